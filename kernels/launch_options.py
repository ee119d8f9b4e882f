"""Options of a kernel's launch that change none of its results."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LaunchOptions:
    """Options that a pass hands to its backend, and the backend to every launch.

    Raises:
        ValueError: a negative number.
    """

    sm_margin: int = 0
    """Number of SMs that a persistent kernel leaves free, for example for communication."""

    def __post_init__(self) -> None:
        if self.sm_margin < 0:
            raise ValueError(f"sm_margin={self.sm_margin}: must not be negative")

    def leaving(self, sms: int) -> "LaunchOptions":
        """The options with `sms` more SMs left free."""
        return replace(self, sm_margin=self.sm_margin + sms)


DEFAULT = LaunchOptions()  # options of a launch that may use the whole device
