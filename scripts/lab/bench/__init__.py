"""Framework of the benchmarks (`timing`, `clocks`, `records`), their suites, shapes and models."""
