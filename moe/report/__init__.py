"""What a person sees of a run: start page, table, loggers, traces, warnings."""
