"""MXFP8 and NVFP4: definitions in plain torch, and their emulation on any device."""
