"""Names of the tasks, and the metrics that can select the best weights of a run."""

# Task -> metrics of its evaluations besides the loss, each a possible value of `best`.
METRICS: dict[str, tuple[str, ...]] = {
    "text": (),
    "causal-lm": (),
    "classification": ("accuracy", "mcc", "f1", "f1_binary"),  # f1: mean over classes
    "seq2seq": ("bleu", "chrf"),  # of the rows that `translate` selects
    "regression": ("pearson", "spearman"),
    "image-classification": ("accuracy", "mcc", "f1", "f1_binary"),
    "question-answering": ("exact_match", "f1"),  # f1: over the words of an answer
    "tagging": ("f1", "precision", "recall", "accuracy"),  # over spans; accuracy: over words
    "multiple-choice": ("accuracy",),
}
TASKS = tuple(METRICS)
PICTURES = ("image-classification",)
READING = tuple(task for task in TASKS if task not in PICTURES)  # text tasks, with a tokenizer
WRITING = ("text", "causal-lm", "seq2seq")  # generation tasks, whose evaluations show samples
