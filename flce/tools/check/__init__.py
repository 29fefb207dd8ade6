"""The checks of ``flce check``: errors of flce's results on this machine.

`suite` lists the checks of a device and a backend. A check of `checks` compares the results of flce with PyTorch's
operators in float64 and in the dtype of the check. `processes` has the checks of a head that is divided over processes.
"""
