"""Options of a kernel's launch that change none of its results."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LaunchOptions:
    """Options of every launch of a pass; ValueError for a negative number."""

    sm_margin: int = 0  # SMs that a persistent kernel leaves free, as for communication

    def __post_init__(self) -> None:
        if self.sm_margin < 0:
            raise ValueError(f"sm_margin={self.sm_margin}: must not be negative")

    def leaving(self, sms: int) -> "LaunchOptions":
        return replace(self, sm_margin=self.sm_margin + sms)


DEFAULT = LaunchOptions()  # options of a launch that may use the whole device
