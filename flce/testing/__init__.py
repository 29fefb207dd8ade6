"""References of `flce check`, the benchmarks and the tests: problems, stock operators, float64 oracle, tolerances."""
