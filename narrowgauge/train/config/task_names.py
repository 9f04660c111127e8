"""The tasks, and which metrics may choose the best weights of a run."""

# Task -> what its evaluations measure beside the loss, and may choose the best weights by.
METRICS: dict[str, tuple[str, ...]] = {
    "text": (),
    "causal-lm": (),
    "classification": ("accuracy", "mcc", "f1", "f1_binary"),  # f1 is the mean over classes
    "seq2seq": ("bleu", "chrf"),  # of what is translated, with `translate`
    "regression": ("pearson", "spearman"),
    "image-classification": ("accuracy", "mcc", "f1", "f1_binary"),
    "question-answering": ("exact_match", "f1"),  # f1 over words of answers
    "tagging": ("f1", "precision", "recall", "accuracy"),  # of spans; accuracy of words
    "multiple-choice": ("accuracy",),
}
TASKS = tuple(METRICS)
PICTURES = ("image-classification",)
READING = tuple(task for task in TASKS if task not in PICTURES)  # tasks on texts, which a tokenizer cuts
WRITING = ("text", "causal-lm", "seq2seq")  # tasks whose models write samples
