"""All that this framework changes in Megatron-Core, which it otherwise uses as it is.

`cpu` has it run without CUDA, `adam` and `weight_grad` stand in for Transformer Engine's and
Apex's, `patches` are changes of its objects. They name its private parts, so that `imports` refuses
a release that nobody has looked at.
"""
