"""The experts inside other people's trainers: one module or package for each, over the public API.

They are imported as `phalanx.adapters`, and need what they adapt: the extras `transformers`,
`torchtitan`, `megatron` and `veomni` name the versions.
"""
