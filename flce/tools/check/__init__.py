"""The checks of ``flce check``: `suite` lists the checks of this machine, `processes` checks of a divided head."""
