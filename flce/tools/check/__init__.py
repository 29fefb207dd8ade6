"""Whether flce is exact on this machine: what ``flce check`` runs.

`suite` lists the checks of a device and a backend, `run` runs them, `report` says what came of them. A check is a
frozen dataclass that says what is called. Its `measure()` calls that, and PyTorch's own operators in float64 and in its
dtype (`reference`). `tolerances` says how far from float64 a result may be.
"""
