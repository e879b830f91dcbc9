"""Heavy proofs, run by hand through make; small forms of them are in the test suite."""
