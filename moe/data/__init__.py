"""From text and token files to the samples of a step."""
