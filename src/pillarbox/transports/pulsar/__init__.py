"""Apache Pulsar, exactly once: a producer of our own, and what has to be there before it can publish."""
