"""Parameters, FLOPs and balanced stages, which follow from a configuration by arithmetic."""
