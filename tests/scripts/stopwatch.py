"""A CPU clock, for tests of benchmarks."""

import time

import torch

CPU = torch.device("cpu")


class Stopwatch:
    """A `Clock` on the CPU that counts flushes and captures."""

    device = CPU

    def __init__(self) -> None:
        self.flushes = self.captures = 0

    def flush(self):
        self.flushes += 1

    def stamp(self):
        return time.perf_counter()

    def between(self, begin, end):
        return (end - begin) * 1000 + 1e-3

    def wait(self):
        pass

    def capture(self, call):
        self.captures += 1
        return call

    def free(self):
        pass
