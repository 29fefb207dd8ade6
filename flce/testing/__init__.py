"""What `flce check`, benchmarks and the tests compare with: one problem, one float64 oracle, one table of tolerances.

`problem` makes the tensors of a call and runs it through flce and through PyTorch's own operators. `oracle` computes
what it has to return. `tolerances` says how far from that a result may be. `models` has a tiny language model.
"""
