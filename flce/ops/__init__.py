"""The operators behind the public functions: arguments are checked, a plan is asked for, autograd is served."""
