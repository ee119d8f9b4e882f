"""Options of the exchanges between the GPUs of a node, from the configuration to the launches."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ExchangeOptions:
    """SMs that exchange, and the limit of a wait."""

    comm_sms: int = 0
    """Number of SMs that push while other kernels run; 0 takes all, and nothing overlaps."""
    timeout: float = 600  # timeout in seconds of a wait for a peer
    two_passes: bool = False
    """True if passes of two micro-batches exchange at a time. Each pass then pushes with its
    reserved SMs alone, and no kernel that computes waits for rows: with SMs left in any case, every
    push runs, and no pass can keep the other one from what it waits for."""

    @property
    def overlaps(self) -> bool:
        """True if exchanges run under other kernels, on SMs of their own."""
        return self.comm_sms > 0

    @property
    def in_waves(self) -> bool:
        """True if kernels that compute may wait for parts of an exchange."""
        return self.overlaps and not self.two_passes

    @property
    def limit_ms(self) -> int:
        """The timeout in milliseconds, as kernels take it."""
        return int(1000 * self.timeout)

    def sms(self, device: torch.device, *, all_sms: bool = False) -> int:
        """Number of SMs of a kernel that exchanges on a GPU.

        Args:
            device: the GPU.
            all_sms: take all SMs, as no other kernel of this pass runs; so do kernels without
                reserved ones.
        """
        if self.overlaps and (self.two_passes or not all_sms):
            return self.comm_sms
        return torch.cuda.get_device_properties(device).multi_processor_count
