"""Names of settings in other trainers, and what to type here.

Transformers' Trainer (Tr), TRL, axolotl (ax), LLaMA-Factory (LF), torchtune (tt) and Unsloth (un)
call the same settings by other names. A name is understood where its meaning is the same here
(`Same`), or where the rest of the command decides it (`Depends`). Otherwise an error says what to
type (`Answer`). Names that are settings here, or former ones, are not in the table.

    understood(name, value, beside)  settings that a flag of another trainer stands for
    answer(name, value, spelled)     what to type instead of it

Names are written with underscores, as in a file; the flag of `save_steps` is --save-steps, and
--save_steps is taken too.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Settings = tuple[tuple[str, str], ...]  # (key, value) here
SWITCH = {"": True, "true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True)
class Beside:
    """The rest of the command beside a flag.

    foreign  values of the other trainers' flags, by name
    own      values of this trainer's flags, by key
    task     the task, of a flag or of the file
    ranks    processes under torchrun
    """

    foreign: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict)
    task: str = "text"
    ranks: int = 1

    def value(self, names: str) -> str:
        """Value of the first of these foreign names that was given, or ''."""
        return next((self.foreign[name] for name in names.split() if name in self.foreign), "")


@dataclass(frozen=True)
class Same:
    """A setting of the same meaning.

    key     its name here
    values  values with other names here. A value that is not listed is taken as it is
    only    True: values beyond those listed have no meaning here, and `otherwise` says what to type
    comma   what stands here for a comma in the value
    whole   True: a whole number, also written as 3.0
    """

    key: str
    values: Mapping[str, str] = field(default_factory=dict)
    only: bool = False
    otherwise: str = ""
    comma: str = ","
    whole: bool = False

    @property
    def is_switch(self) -> bool:
        """True if the flag alone means something."""
        return "" in self.values


@dataclass(frozen=True)
class Answer:
    """What to type here, in words.

    {value} stands for the value that was given, or for `default`; {four} for four times as much.
    """

    words: str
    default: str = "N"


@dataclass(frozen=True)
class Depends:
    """A name whose meaning follows from its value and the rest of the command.

    read       (value, Beside) -> settings here; () if nothing changes by it; None: `otherwise`
    otherwise  what to type if that does not decide it
    alone      True: the flag alone means something, and a word behind it is its value only if it
               is true, false or none, or if `is_value` says so
    shown      what it stands for, for the table in the documents
    """

    read: Callable[[str, Beside], Settings | None]
    otherwise: Answer
    shown: str
    alone: bool = False
    is_value: Callable[[str], bool] = lambda word: False

    @property
    def is_switch(self) -> bool:
        return self.alone


Meaning = Same | Depends | Answer


def _switch(key: str, on: str, off: str) -> Same:
    """A switch there, a value here. The flag alone means on."""
    words = {"": on, "true": on, "1": on, "yes": on, "false": off, "0": off, "no": off}
    return Same(key, words, only=True, otherwise="It takes true or false")


def _all(names: str, meaning: Meaning) -> dict[str, Meaning]:
    return dict.fromkeys(names.split(), meaning)


# --- Names that depend on the rest of the command

PER_DEVICE = (
    "per_device_train_batch_size per_gpu_train_batch_size train_batch_size micro_batch_size train_micro_batch_size_per_gpu "
    "batch_size_per_device"
)
ACCUMULATION = "gradient_accumulation_steps grad_accum grad_accumulation_steps gradient_accumulation accumulate_grad_batches"
STEPS = "max_steps num_steps train_steps num_train_steps max_train_steps total_steps max_iters train_iters"


def _whole(text: str) -> int | None:
    """A whole number, also written as 3.0; None for another text."""
    found = re.fullmatch(r"([+-]?\d{1,15})(?:\.0*)?", text)
    return int(found[1]) if found else None


def _rows_of_a_step(value: str, beside: Beside) -> Settings | None:
    """Rows per device x accumulation, on one device. Several may share rows (tp, pp)."""
    rows, parts = _whole(value), _whole(beside.value(ACCUMULATION) or "1")
    if rows is None or parts is None or rows < 1 or parts < 1 or beside.ranks > 1:
        return None
    if "batch.size" in beside.own or beside.value("global_batch_size total_batch_size"):
        return None
    return (("batch.size", str(rows * parts)),)


def _parts_of_a_step(value: str, beside: Beside) -> Settings | None:
    """Micro-batches of a step whose rows are known by another flag."""
    parts = _whole(value)
    is_known = "batch.size" in beside.own or beside.value(
        f"{PER_DEVICE} global_batch_size total_batch_size"
    )
    if parts == 1:
        return ()
    return (("batch.micro_batches", str(parts)),) if parts and parts > 1 and is_known else None


def _longest(cut: str) -> Callable[[str, Beside], Settings | None]:
    def read(value: str, beside: Beside) -> Settings | None:
        if _whole(value) is None:
            return None
        if beside.task == "text":
            return (("model.sequence_length", value),)
        # question-answering reads long contexts in windows, as these trainers' scripts do.
        is_cut = beside.task != "question-answering" and "data.too_long" not in beside.own
        return (("data.max_length", value), *((("data.too_long", cut),) if is_cut else ()))

    return read


def _resumed(value: str, beside: Beside) -> Settings | None:
    if value.lower() in SWITCH:
        return (("resume", "true"),) if SWITCH[value.lower()] else ()
    if value.lower() == "none":
        return ()
    is_run = os.path.isfile(os.path.join(value, "config.toml"))
    return (("resume", "true"), ("output", value.rstrip("/"))) if is_run else None


def _trackers(value: str, beside: Beside) -> Settings | None:
    names = [name for name in re.split(r"[,\s]+", value.strip("[]").lower()) if name]
    if not names or not {*names} <= {"wandb", "mlflow", "trackio", "tensorboard", "none"}:
        return None
    others = [name for name in names if name not in ("tensorboard", "none")]
    events = (("log.tensorboard", "true"),) if "tensorboard" in names else ()
    return (("log.to", ",".join(others)), *events) if others or not events else events


def _strategy(key: str) -> Depends:
    def read(value: str, beside: Beside) -> Settings | None:
        return {"steps": (), "no": ((key, "0"),)}.get(value.lower())

    flag = f"--{key}"
    return Depends(
        read,
        Answer(f"{flag} says so many steps; 0: after the last step alone"),
        f"`no`: `{flag} 0`; `steps`: as it is",
    )


def _betas(place: int) -> Callable[[str, Beside], Settings | None]:
    def read(value: str, beside: Beside) -> Settings | None:
        own = [beside.value("adam_beta1") or "0.9", beside.value("adam_beta2") or "0.999"]
        own[place] = value
        return (
            (("optimizer.betas", ",".join(own)),)
            if value and "optimizer.betas" not in beside.own
            else None
        )

    return read


def _share_of_steps(value: str, beside: Beside) -> Settings | None:
    steps = _whole(beside.own.get("training.steps") or beside.value(STEPS))
    try:
        share = float(value)
    except ValueError:
        return None
    if not 0 <= share <= 1 or (share and (steps is None or steps < 1)):
        return None
    # As transformers rounds it.
    return (("optimizer.warmup_steps", str(math.ceil(share * (steps or 0)))),)


def _steps(value: str, beside: Beside) -> Settings | None:
    """-1 leaves the length to the epochs."""
    steps = _whole(value)
    return () if steps == -1 else (("training.steps", str(steps)),) if steps is not None else None


def _nothing_if(*values: bool) -> Callable[[str, Beside], Settings | None]:
    return lambda value, beside: () if SWITCH.get(value.lower()) in values else None


def _of_values(table: Mapping[str, Settings]) -> Callable[[str, Beside], Settings | None]:
    return lambda value, beside: table.get(value.lower())


def _adapters(value: str, beside: Beside) -> Settings | None:
    """A rank or another setting of adapters says it already."""
    if value.lower() in ("full", "false", "0", "no", "none"):
        return ()
    is_said = beside.value(
        "lora_r lora_rank r lora_alpha lora_target lora_target_modules target_modules"
    )
    has_own = any(key == "lora" or key.startswith("lora.") for key in beside.own)
    return (
        () if value.lower() in ("", "true", "1", "yes", "lora") and (is_said or has_own) else None
    )


_AMP = (("recipe.name", "none"), ("recipe.precision", "amp-fp16"))
_FLOAT32 = (("recipe.name", "none"), ("recipe.precision", "fp32"))


_BATCH = Answer(
    "--batch.size counts the rows of a whole optimizer step: size per device x accumulation x devices that read different rows. "
    "--batch.micro-batches cuts it: {value} rows at a time in 4 parts on one device are --batch.size {four} --batch.micro-batches 4"
)
_PARTS = Answer(
    "--batch.micro-batches {value} cuts the rows of --batch.size, which counts a whole optimizer step on all devices"
)
_LENGTHS = Answer(
    "--model.sequence-length {value} for running text; --data.max-length {value} for the examples of a table (--task)"
)
_RULES = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_apex_fused": "adamw", "adamw": "adamw",
    "lion": "lion", "lion_32bit": "lion", "sgd": "sgd",
}  # fmt: skip
_OF_8_BITS = {"adamw_8bit": "adamw", "adamw_bnb_8bit": "adamw", "lion_8bit": "lion"}
_OPTIMIZERS: Mapping[str, Settings] = {
    **{name: (("optimizer.name", rule),) for name, rule in _RULES.items()},
    **{
        name: (("optimizer.name", rule), ("optimizer.states", "8bit"))
        for name, rule in _OF_8_BITS.items()
    },
}
_FORMATS_OF_BASE = "With --lora, --base holds frozen weights as codes: --base int8, fp8-block, nvfp4 or mxfp4, one of them"
_PLAN = "narrowgauge plan says what fits, and --parallel.layout fsdp=N shares a model among ranks of torchrun"

FOREIGN: Mapping[str, Meaning] = (
    # --- the model and its data
    _all("model_name_or_path base_model model_id pretrained_model_name_or_path model_name model_path", Same("model.name"))
    | _all("tokenizer_name tokenizer_name_or_path tokenizer_path base_model_config tokenizer_config", Same("data.tokenizer"))
    | _all("train_file dataset_name dataset dataset_path data_path train_data train_dataset datasets", Same("data.source"))
    | _all(
        "validation_file val_data val_file eval_file eval_data eval_dataset test_datasets validation_dataset", Same("data.validation_data"),
    )
    | _all("val_set_size val_size validation_split_ratio test_size", Same("data.validation_fraction"))
    | _all("validation_split_percentage", Answer("--data.validation-fraction 0.05 is a share and no percentage"))
    | _all("dataset_text_field text_column_name text_field", Same("data.column"))
    | _all("dataset_config_name dataset_split split", Answer("Name the files: --data a file or folder, or a data set's name"))
    | _all("n_embd d_model dim embed_dim emb_dim n_dim model_dim", Same("model.hidden_size"))
    | _all("num_layers n_layer n_layers num_hidden_layers num_blocks", Same("model.layers"))
    | _all("num_heads n_head n_heads num_attention_heads", Same("model.heads"))
    | _all("num_key_value_heads num_kv_heads n_kv_heads n_kv_head", Same("model.kv_heads"))
    | _all("ffn_dim d_ff ffn_hidden_size n_inner intermediate_dim", Same("model.intermediate_size"))
    | _all("block_size context_length ctx_len seq_length seq_len context_size", Same("model.sequence_length"))
    | _all(
        "max_seq_length max_seq_len cutoff_len model_max_length",
        Depends(
            _longest("truncate"), _LENGTHS, "`--model.sequence-length` of text; of a table `--data.max-length --data.too-long truncate`"
        ),
    )
    | _all("sequence_len", Depends(
        _longest("skip"), _LENGTHS, "`--model.sequence-length` of text; of a table `--data.max-length --data.too-long skip`"
    ))
    | _all(
        "max_source_length max_prompt_length max_target_length", Answer("--data.max-length {value} holds for prompt and answer together"),
    )
    | _all("train_on_inputs completion_only_loss assistant_only_loss train_on_prompt mask_prompt train_on_source", Answer(
        "--task causal-lm learns answers alone, and --task text learns all of a text"
    ))
    | _all("chat_template template prompt_template", Answer(
        "A tokenizer brings its chat template: --data.tokenizer, and --data.columns.messages for the column of chats"
    ))
    | _all(
        "preprocessing_num_workers dataset_num_proc dataset_processes dataloader_num_workers "
        "num_workers dataloader_pin_memory pin_memory",
        Answer("nothing to type: data are tokenized once into --data.cache and read from memory-mapped files"),
    )
    | _all("overwrite_cache cache_dir dataset_prepared_path data_cache_dir", Answer("--data.cache names the folder of tokenized data"))
    | _all("streaming", Answer("nothing to type: tokens are read from a file as they are needed, and never all at once"))
    | _all("pad_to_multiple_of", Same("batch.pad_multiple"))
    | _all("group_by_length", _switch("batch.order", "length", "shuffled"))
    | _all("sample_packing use_packing pack multipack", Answer("--batch.packing 2048 fills rows of so many tokens with several examples"))
    # --- length of the run, batches
    | _all("num_train_epochs num_epochs epoch max_epochs train_epochs n_epochs", Same(
        "training.epochs", whole=True, otherwise="--training.epochs is a whole number of passes, and --training.steps a part of one"
    ))
    | _all(STEPS, Depends(_steps, Answer("--training.steps N"), "`--training.steps`; -1: nothing"))
    | _all(PER_DEVICE, Depends(
        _rows_of_a_step, _BATCH, "`--batch.size`, times the accumulation; on several ranks you say it"
    ))
    | _all("per_device_eval_batch_size eval_batch_size", Answer("nothing to type: evaluation takes the batches of training"))
    | _all("global_batch_size total_batch_size", Same("batch.size"))
    | _all(ACCUMULATION, Depends(_parts_of_a_step, _PARTS, "`--batch.micro-batches`, beside the rows per device or of a step"))
    | _all("data_seed random_seed manual_seed", Same("training.seed"))
    # --- optimizer
    | _all("lr max_lr peak_lr base_lr", Same("optimizer.learning_rate"))
    | _all("min_lr lr_end eta_min final_lr", Same("optimizer.min_learning_rate"))
    | _all("lr_scheduler_type lr_scheduler lr_schedule scheduler lr_decay_style", Same(
        "optimizer.schedule",
        {each: each for each in ("cosine", "linear", "constant", "warmup-stable-decay")}
        | {"constant_with_warmup": "constant", "warmup_stable_decay": "warmup-stable-decay", "wsd": "warmup-stable-decay"},
        only=True,
        otherwise="--optimizer.schedule is cosine, linear, constant or warmup-stable-decay, and --optimizer.min-learning-rate its end",
    ))
    | _all("num_warmup_steps warmup_iters lr_warmup_steps lr_warmup_iters warmup", Same("optimizer.warmup_steps"))
    | _all("warmup_ratio warmup_fraction lr_warmup_fraction", Depends(
        _share_of_steps, Answer("--optimizer.warmup-steps: {value} times the steps of the run", "0.03"),
        "`--optimizer.warmup-steps`, if the steps are given too",
    ))
    | _all("wd", Same("optimizer.weight_decay"))
    | _all("max_grad_norm gradient_clipping gradient_clip_val clip_grad_norm max_norm clip_grad grad_clip", Same("optimizer.clip"))
    | _all("adam_beta1", Depends(
        _betas(0), Answer("--optimizer.betas {value},0.999 holds both", "0.9"), "`--optimizer.betas`, with the other or 0.999"
    ))
    | _all("adam_beta2", Depends(
        _betas(1), Answer("--optimizer.betas 0.9,{value} holds both", "0.999"), "`--optimizer.betas`, with the other or 0.9"
    ))
    | _all("adam_epsilon adam_eps eps", Same("optimizer.epsilon"))
    | _all("optim optimizer_type optimizer_name", Depends(
        _of_values(_OPTIMIZERS),
        Answer("--optimizer.name is adamw, lion, sgd or radam; --optimizer.states 8bit holds its moments in 8 bits; none of them is paged"),
        "`--optimizer`; `adamw_bnb_8bit`, `adamw_8bit`: with `--optimizer.states 8bit`",
    ))
    | _all("optim_args optim_target_modules", Answer("Each argument is a setting of [optimizer]: see narrowgauge train --help"))
    | _all("use_8bit_adam", _switch("optimizer.states", "8bit", "fp32"))
    # --- numbers
    | _all("bf16 use_bf16", Same(
        "recipe.name", {"": "bf16", "true": "bf16", "1": "bf16", "yes": "bf16", "full": "bf16", "auto": "bf16"}, only=True,
        otherwise="Without it: --recipe none --recipe.precision fp32",
    ))
    | _all("fp8 use_fp8 load_in_fp8 enable_fp8 fp8_training", Same(
        "recipe.name", {"": "fp8-current", "true": "fp8-current", "1": "fp8-current", "yes": "fp8-current"}, only=True,
        otherwise="--recipe names the kind of FP8: fp8-current, fp8-delayed, fp8-row, fp8-block or mxfp8. Without FP8: --recipe bf16",
    ))
    | _all(
        "fp8_recipe fp8_format fp8_scaling",
        Answer("--recipe names the kind of FP8: fp8-current, fp8-delayed, fp8-row, fp8-block or mxfp8"),
    )
    | _all("fp16 use_fp16", Depends(
        lambda value, beside: {True: _AMP, False: ()}.get(SWITCH.get(value.lower())),  # type: ignore[arg-type]
        Answer("--recipe none --recipe.precision amp-fp16"),
        "`--recipe none --recipe.precision amp-fp16`",
        alone=True,
    ))
    | _all("mixed_precision", Depends(
        _of_values({
            "bf16": (("recipe.name", "bf16"),), "fp8": (("recipe.name", "fp8-current"),), "fp16": _AMP, "no": _FLOAT32,
        }),
        Answer("--recipe names the numbers of products, as bf16 or fp8-current, and --recipe.precision those of the rest"),
        "`bf16`: `--recipe bf16`; `fp8`: `--recipe fp8-current`; `no`: `--recipe none --recipe.precision fp32`",
    ))
    | _all("torch_dtype dtype half_precision_backend amp_backend", Answer(
        "--recipe names the numbers of products, as bf16 or fp8-current, and --recipe.precision those of the rest"
    ))
    | _all("bf16_full_eval fp16_full_eval tf32", Answer("nothing to type: --recipe and --recipe.precision say all about numbers"))
    | _all("load_in_8bit load_in_4bit bits quantization_bit quantization_method bnb_4bit_quant_type quantization", Answer(_FORMATS_OF_BASE))
    # --- adapters
    | _all("lora_r lora_rank r", Same("lora.r"))
    | _all("lora_alpha", Same("lora.alpha"))
    | _all("lora_dropout", Same("lora.dropout"))
    | _all(
        "lora_target_modules lora_target target_modules",
        Same("lora.targets", {"all": "all-linear", "all_linear": "all-linear"}, comma="+"),
    )
    | _all("use_dora peft_use_dora lora_dora", _switch("lora.dora", "true", "false"))
    | _all("use_rslora peft_use_rslora", _switch("lora.rslora", "true", "false"))
    | _all("lora_target_linear", Answer("--lora.targets all-linear is the default of --lora"))
    | _all("use_peft finetuning_type peft_method", Depends(
        _adapters,
        Answer("--lora r=16,alpha=32,targets=all-linear trains adapters; without it all weights train"),
        "nothing beside `--lora`; without it say `--lora`",
        alone=True,
        is_value=lambda word: word in ("lora", "full", "freeze", "qlora"),
    ))
    | _all("qlora use_qlora quantized_lora loftq_config", Answer(_FORMATS_OF_BASE))
    | _all("modules_to_save lora_modules_to_save additional_target", Answer(
        "Adapters alone train beside --lora; without it --model.freeze names what does not"
    ))
    | _all(
        "freeze_layers unfrozen_parameters freeze_trainable_layers", Answer("--model.freeze 'embed*,layers.0-3' names what does not train"),
    )
    # --- memory and devices
    | _all("gradient_checkpointing use_gradient_checkpointing activation_checkpointing enable_activation_checkpointing",
           _switch("memory.checkpointing", "full", "none"))
    | _all(
        "gradient_checkpointing_kwargs disable_gradient_checkpointing",
        Answer("--memory.checkpointing is none, selective, full, every-N or sqrt"),
    )
    | _all("torch_compile use_compile", _switch("device.compile", "true", "false"))
    | _all("torch_compile_backend torch_compile_mode", Answer("--device.compile compiles by torch's own backend"))
    | _all("no_cuda use_cpu", _switch("device.name", "cpu", "auto"))
    | _all("device_map low_cpu_mem_usage max_memory deepspeed deepspeed_config zero_stage", Answer(_PLAN))
    | _all("fsdp fsdp_config data_parallel_shard_degree", Answer("--parallel.layout fsdp=N, under torchrun"))
    | _all(
        "tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size",
        Answer("--parallel.layout tp={value}, under torchrun"),
    )
    | _all(
        "pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size pp_size",
        Answer("--parallel.layout pp={value}, under torchrun"),
    )
    | _all(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_timeout",
        Answer("nothing to type: copies on the ranks of torchrun need no setting; --parallel.timeout-s is the wait for a rank"),
    )
    | _all("attn_implementation flash_attention flash_attn use_flash_attention_2 sdp_attention xformers_attention", Answer(
        "nothing to type: torch's fastest attention is taken, and the first lines of a run name it"
    ))
    # --- evaluation, checkpoints, logs
    | _all("output_dir save_dir out_dir run_dir checkpoint_dir", Same("output"))
    | _all("eval_steps eval_interval val_check_interval run_val_every_n_steps eval_freq", Same(
        "evaluation.every", whole=True, otherwise="--evaluation.every is a whole number of steps"
    ))
    | _all("evaluation_strategy eval_strategy", _strategy("evaluation.every"))
    | _all("do_train do_eval", Depends(
        _nothing_if(True), Answer("nothing to type: narrowgauge train trains, narrowgauge evaluate evaluates"), "nothing", alone=True,
    ))
    | _all("do_predict predict_with_generate", Answer("narrowgauge evaluate RUN --tasks scores a run, and narrowgauge generate RUN writes"))
    | _all(
        "save_steps save_interval save_every ckpt_interval save_every_n_steps checkpoint_interval",
        Same("checkpoint.every", whole=True, otherwise="--checkpoint.every is a whole number of steps"),
    )
    | _all("save_strategy", _strategy("checkpoint.every"))
    | _all("save_total_limit keep_last_n_checkpoints max_checkpoints", Same(
        "checkpoint.keep", whole=True, otherwise="--checkpoint.keep is a whole number"
    ))
    | _all(
        "save_only_model save_safetensors",
        Answer("nothing to type: checkpoints hold the whole run, and RUN/final the model as safetensors"),
    )
    | _all("resume_from_checkpoint auto_resume_from_checkpoints resume_from load_checkpoint", Depends(
        _resumed,
        Answer("--resume --output RUN goes on with a run of this trainer; --from RUN@STEP starts a branch of it"),
        "`--resume`; with a run folder `--resume --output RUN`",
        alone=True,
        is_value=lambda word: not word.startswith("-") and not word.endswith(".toml"),
    ))
    | _all("logging_steps log_interval log_freq log_every_n_steps logging_interval", Same(
        "log.every", whole=True, otherwise="--log.every is a whole number of steps"
    ))
    | _all("logging_strategy", _strategy("log.every"))
    | _all("report_to logger log_with", Depends(
        _trackers,
        Answer("--log.to takes wandb, mlflow or trackio, or several with commas; --log.tensorboard writes TensorBoard's events"),
        "`--log.to`; `tensorboard`: `--log.tensorboard`",
    ))
    | _all("logging_dir tensorboard_dir use_tensorboard", Answer("--log.tensorboard writes TensorBoard's events into the run folder"))
    | _all("wandb_project wandb_name wandb_entity run_name wandb_run_id", Answer(
        "--log.to wandb; the tracker reads its own variables, as WANDB_PROJECT and WANDB_NAME"
    ))
    | _all(
        "load_best_model_at_end metric_for_best_model greater_is_better",
        Answer("--task.best names the metric whose best checkpoint is exported"),
    )
    | _all("push_to_hub hub_model_id hub_token", Answer("narrowgauge export writes a folder; hf upload sends it"))
    | _all("early_stopping_patience early_stopping", Answer("No run stops early here; --task.best keeps the best checkpoint"))
    | _all("overwrite_output_dir", Answer("nothing overwrites a run: --output names another folder, and --resume goes on with one"))
    | _all("trust_remote_code", Answer("nothing to type: code of a model or data set never runs; name a model that transformers knows"))
    | _all("hf_token token use_auth_token", Answer("nothing to type: huggingface_hub reads HF_TOKEN, or the token of `hf auth login`"))
    | _all("use_liger_kernel use_liger liger_kernel liger", Answer(
        "--recipe.fuse fuses norms and activations with their casts, and the loss is computed in chunks without it (--training.loss)"
    ))
    | _all("full_determinism deterministic use_deterministic_algorithms", Answer(
        "--training.seed decides a run; the same command repeats it"
    ))
    | _all("local_rank ddp_backend master_port num_processes nproc_per_node num_gpus gpus", Answer(
        "torchrun starts the ranks, and --parallel says how they share a run"
    ))
    | _all("rope_scaling rope_theta resize_token_embeddings resize_vocab", Answer(
        "The model's own config.json says it: --model names the folder"
    ))
    | _all(
        "rlhf stage loss_type max_completion_length num_generations ref_model reward_model dpo_beta pref_beta",
        Answer("No preference is learnt here: TRL's trainers take narrowgauge.integrations.convert_trainer (docs/training.md)"),
    )
    | _all(
        "neftune_noise_alpha label_smoothing_factor label_smoothing",
        Answer("Not built here; without it a run is as told by the other settings"),
    )
)  # fmt: skip


def understood(name: str, value: str, beside: Beside = Beside()) -> Settings | None:
    """(key, value) here of another trainer's setting; None if its meaning is not the same.

    value  '' for a flag without one

    () if it asks for what happens anyway.
    """
    meaning = FOREIGN.get(name)
    if isinstance(meaning, Depends):
        return meaning.read(value, beside)
    if not isinstance(meaning, Same):
        return None
    found = meaning.values.get(value.lower())
    if found is None and (meaning.only or not value):
        return None
    if meaning.whole and (number := _whole(value)) is None:
        return None
    if meaning.whole:
        return ((meaning.key, str(number)),)
    return ((meaning.key, value.replace(",", meaning.comma) if found is None else found),)


def answer(name: str, value: str, spelled: Callable[[str], str]) -> str:
    """What to type here instead of another trainer's setting, or '' for a name that nobody has.

    spelled  a text with flags as it stands where the setting was given: in a file they are keys
    """
    meaning = FOREIGN.get(name)
    if meaning is None:
        return ""
    if isinstance(meaning, Depends):
        meaning = meaning.otherwise
    if isinstance(meaning, Answer):
        is_count = re.fullmatch(r"[+-]?\d{1,9}", value)
        is_usable = value and len(value) <= 40 and not (is_count and int(value) < 1)
        given = value if is_usable else meaning.default
        four = str(4 * int(given)) if given.isdecimal() else f"4 x {given}"
        return spelled(f"{meaning.words.format(value=given, four=four)}.")
    needs = "" if value or meaning.is_switch else ", and it needs a value"
    return spelled(f"{meaning.otherwise or '--' + meaning.key.replace('_', '-')}{needs}.")


def documented() -> Mapping[str, str]:
    """{what is typed here: names of other trainers} of the names that are understood.

    The table of docs/training.md is drawn from it.
    """
    found: dict[str, list[str]] = {}
    for name, meaning in FOREIGN.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(meaning, Same):
            here = f"`--{meaning.key.replace('_', '-')}`"
            on = meaning.values.get("", "")
            found.setdefault(f"{here[:-1]} {on}`" if on else here, []).append(flag)
        elif isinstance(meaning, Depends):
            found.setdefault(meaning.shown, []).append(flag)
    return {here: ", ".join(f"`{name}`" for name in names) for here, names in found.items()}
