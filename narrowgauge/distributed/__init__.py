"""Training on many devices, on torch's own engine: what travels between ranks, in which numbers, and the proof that nothing drifts."""
