"""Whether flce is exact on this machine: what ``flce check`` runs.

`suite` lists the checks of a device and a backend. A check of `checks` calls flce, and PyTorch's own operators in
float64 and in the check's dtype, and compares them. `processes` has the checks of a divided head.
"""
