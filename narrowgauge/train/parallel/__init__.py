"""A run on several ranks of torchrun: the ranks and what they agree on, the spread model, its checkpoints, digests of what is equal."""
