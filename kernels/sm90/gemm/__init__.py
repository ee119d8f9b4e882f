"""The grouped GEMM: tiles, scheduler, pipeline of stages, main loop, epilogues."""
