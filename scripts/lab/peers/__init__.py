"""Speed of published runs by the estimate, told the dispatcher, overlap and kernels of their stack.

The same work, traffic and schedule as of our own runs, with the rates of others: `dispatchers` has
published rates of packages that exchange tokens, `kernels` measured ones of Transformer Engine and
of attention libraries. `python -m scripts.lab.peers` prints the table of docs/published.
"""
