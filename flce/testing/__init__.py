"""References of `flce check`, the benchmarks and the tests.

`problem` creates the tensors of a call and runs flce and PyTorch's operators on them. `oracle` computes the results in
float64. `tolerances` has the allowed errors. `models` has a tiny language model.
"""
