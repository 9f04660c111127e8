"""The tasks, and which metrics may choose the best weights of a run."""

# Task -> what its evaluations measure beside the loss, and may choose the best weights by.
METRICS: dict[str, tuple[str, ...]] = {
    "text": (),
    "causal-lm": (),
    "classification": ("accuracy", "mcc", "f1", "f1_binary"),  # f1 is the mean over classes
    "seq2seq": (),
    "regression": ("pearson", "spearman"),
}
TASKS = tuple(METRICS)
WRITING = ("text", "causal-lm", "seq2seq")  # tasks whose models write samples
