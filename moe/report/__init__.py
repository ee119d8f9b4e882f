"""Output of a run: start page, table, loggers, traces, warnings."""
