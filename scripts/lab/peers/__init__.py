"""Speed of published runs by the estimate, told the dispatcher, overlap and kernels of their stack.

Rates of packages that exchange tokens are published (`dispatchers`), those of kernels measured.
`python -m scripts.lab.peers` prints the table of docs/published.
"""
