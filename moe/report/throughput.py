"""Throughput of a run: seconds per step, tokens and FLOPs per second of a GPU.

The trainer restarts the clock after anything that is not a step (validation, checkpoints). It reads
the clock when the device has finished the last step except for the optimizer update, which is still
running: between two readings there are as many updates as steps. FLOPs are those of
`configs.arithmetic.accounting`.
"""

import time
from collections.abc import Callable

import torch

from phalanx.configs.arithmetic.accounting import bf16_peak, flops_per_token, fp8_peak
from phalanx.configs.formats import in_bf16, is_fp8
from phalanx.configs.schema import Config
from phalanx.parallel.runtime import Runtime


class Pace:
    """Clock over training steps.

    Args:
        cfg: tokens of a sample and FLOPs of a token.
        runtime: ranks that share a step, and the device whose peak is the base of utilisation.
        samples: returns the data cursor, in samples.
    """

    def __init__(self, cfg: Config, runtime: Runtime, samples: Callable[[], int]) -> None:
        self._samples = samples
        self._tokens = cfg.data.sequence_length / runtime.world
        self._flops = flops_per_token(cfg.model, cfg.data.sequence_length)
        self._peaks = peaks(cfg, runtime.device)
        self._device = runtime.device
        self.restart(0)

    def restart(self, step: int) -> None:
        """Start the clock at the end of `step`."""
        self._since, self._step, self._read = time.perf_counter(), step, self._samples()
        self._restarted = True

    def rates(self, step: int) -> dict[str, float]:
        """Mean rates of the steps up to `step` since the clock was started; restarts it.

        Returns:
            step_time (s), tokens_per_second_per_gpu, tflops_per_gpu; if the device's peaks are
            known mfu, the fraction of the bf16 peak, and in FP8 runs mfu_fp8, that of the FP8 peak.
        """
        now = until = time.perf_counter()
        if self._restarted and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # no update was running when the clock started
            until = time.perf_counter()
        seconds = (until - self._since) / (step - self._step)
        samples = (self._samples() - self._read) / (step - self._step)
        self._since, self._step, self._restarted = now, step, False
        self._read = self._samples()
        tokens = samples * self._tokens / seconds
        tflops = tokens * self._flops / 1e12
        utilisation = {name: tflops / peak for name, peak in self._peaks.items()}
        return {
            "step_time": seconds,
            "tokens_per_second_per_gpu": tokens,
            "tflops_per_gpu": tflops,
            **utilisation,
        }


def peaks(cfg: Config, device: torch.device) -> dict[str, float]:
    """Dense peaks in TFLOP/s by name of the utilisation: `mfu`, `mfu_fp8`.

    FP8 runs have both, so that they compare with bf16 ones. Unknown devices and CPUs have none.
    """
    if device.type != "cuda" or not in_bf16(cfg):
        return {}
    name = torch.cuda.get_device_name(device)
    known = {"mfu": bf16_peak(name), "mfu_fp8": fp8_peak(name) if is_fp8(cfg) else None}
    return {key: peak for key, peak in known.items() if peak}
