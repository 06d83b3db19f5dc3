"""Every key that a job file may hold: one class per table, one attribute per key, whose docstring is the help text.

The tables are strict (`"100"` is not an int, an unknown key is an error) and frozen (a loaded config never changes).
*Run tables* decide what is learned, *machine tables* how it is computed; `is_run_key` draws the line that resuming and
checkpoints rely on. Nothing here imports torch, so `--help` and `--validate` answer in a fraction of a second.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypeIs

from configs.architectures.hf import HfKeys
from configs.architectures.llama_keys import LlamaKeys
from configs.architectures.own import OwnKeys
from configs.only_with import only_with
from configs.own_code import EXAMPLE, ImportPath, is_import_path
from configs.places import is_url, local_folder
from configs.table import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    NotBool,
    Pattern,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Table,
)

Dtype = Literal["float32", "bfloat16", "float64"]
Gib = Annotated[float, Field(ge=0, lt=1e9)]
"""GiB, so few that the bytes are a number."""
_FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


# --------------------------------------------------------------------------- run tables: what is learned


class Model(LlamaKeys):
    """Shape of the model."""


class HfModel(HfKeys):
    """A model of Hugging Face."""


class OwnModel(OwnKeys):
    """A model of the user's own."""


AnyModel = Model | HfModel | OwnModel
"""The table [model] of any architecture. All have vocab_size, dim, n_layers, n_heads, n_kv_heads, head_dim, n_experts
and experts_per_token, so that most code need not know which it is."""


def is_described(model: AnyModel) -> TypeIs[Model]:
    """Whether there is a description of the model's weights; otherwise only its modules know them."""
    return isinstance(model, Model)


def tag_of_model(table: Any) -> str:
    """The architecture of a table [model], parsed or not: "hf", "own" for an import path, otherwise a native one."""
    name = table.get("architecture") if isinstance(table, Mapping) else getattr(table, "architecture", None)
    if is_import_path(name):
        return "own"
    return "hf" if name == "hf" else "llama"


TABLES_OF_MODEL: dict[str, type[Model] | type[HfModel] | type[OwnModel]]
TABLES_OF_MODEL = {"llama": Model, "hf": HfModel, "own": OwnModel}


def table_of_model(table: Any) -> type[Model] | type[HfModel] | type[OwnModel]:
    """The class for a table [model]."""
    return TABLES_OF_MODEL[tag_of_model(table)]


class Tokenizer(Table):
    """How text becomes token ids."""

    path: str | None = None
    """A SentencePiece .model, or a tokenizer.json (needs the package `tokenizers`), also in object storage. The run
    folder gets a copy. The file may move: a resume compares its content."""
    train_on: list[str] = []
    """If `path` does not exist, train a SentencePiece BPE model with model.vocab_size pieces on these texts."""


class Source(Table):
    """One source of samples."""

    name: str
    """Name of the source; the order of its samples depends on it."""
    kind: Literal["tokens", "text", "synthetic"] | ImportPath
    """tokens: a folder of token files; text: tokenized during training; synthetic: reproducible random tokens; or a
    class of your own (docs/own_models.md)."""
    path: Annotated[
        str | None, only_with("kind", "tokens", "text", EXAMPLE, reason="whose tokens are read from nowhere")
    ] = None
    """tokens: the folder, or its place in object storage, s3://BUCKET/NAME (docs/buckets.md); text: a file, a folder, a
    glob pattern, or hub:NAME[:CONFIG][@REVISION][#SPLIT], a dataset on the Hugging Face Hub, whose revision is resolved
    to a commit when the run begins and then kept."""
    weight: PositiveFloat = 1.0
    """Share of the samples drawn from this source, relative to the other sources."""
    shuffle: Annotated[bool, only_with("kind", "tokens")] = True
    """Read the windows in a random order, another one in each epoch; false: in the order of the folder, as for a
    curriculum."""
    text_key: Annotated[str, only_with("kind", "text", EXAMPLE)] = "text"
    """Field or column that holds the text in files of records and hub rows."""
    document_length: Annotated[PositiveInt | None, only_with("kind", "synthetic", EXAMPLE)] = None
    """Mean length of the documents in tokens; default: each window is one document."""


class Prepare(Table):
    """Token files that are created from text when a run first needs them."""

    input: list[str]
    """Files, folders, glob patterns, hub:NAME[:CONFIG][@REVISION][#SPLIT], or python_stdlib (the standard library's
    source on this machine)."""
    output: str
    """Folder for the token files: OUTPUT/train and OUTPUT/validation; created if it does not exist."""
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the documents, chosen by a hash of their content, that goes to OUTPUT/validation."""
    max_bad_files: NonNegativeInt = 0
    """Number of unreadable files and lines that may be skipped (each is named); more are an error."""
    text_key: str = "text"
    """Field or column that holds the text in files of records and hub rows; also for tokenizer.train_on."""
    separator: str = ""
    """Cut .txt files into documents at each of these; also for tokenizer.train_on."""
    drop_duplicates: bool = False
    """Use only the first of documents with exactly the same text."""
    pack: bool = False
    """Pack whole documents into windows of training.seq_len by best fit, instead of cutting one stream into windows."""
    prompt_key: Annotated[str, Field(min_length=1)] | None = None
    """Field or column, in files of records and hub rows, of a prompt: it comes before the text, and gives no loss;
    tokenizer.train_on reads the text alone."""
    mask_until: Annotated[str, Field(min_length=1)] | None = None
    """Only the tokens behind this text give loss, such as answers behind "<|assistant|>" (docs/data.md)."""
    mask_after: Annotated[Annotated[str, Field(min_length=1)] | None, only_with("mask_until")] = None
    """The tokens behind this text give no loss again, until the next mask_until: the end of an answer."""
    fim_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the training documents whose middle is moved to their end, so that the model learns to fill in the
    middle. The tokenizer needs three tokens for it; one that `train_on` trains gets them (docs/data.md)."""
    fim_spm_rate: Annotated[Annotated[float, Field(ge=0, le=1)] | None, only_with("fim_rate")] = None
    """Share of these documents that have the suffix before the prefix (SPM); default: 0.5."""


class Data(Table):
    """Training data and its proportions."""

    sources: Annotated[list[Source], Field(min_length=1)]
    """Sources, mixed by weight."""
    document_mask: bool = False
    """Separate the documents in a window: no attention between them, and positions restart at each."""
    cache_gib: Gib = 16.0
    """The most that blocks of token files in object storage take on a host's disk, in GiB (machine key); 0: nothing."""
    cache_folder: str | None = None
    """Folder on each host's own disk for these blocks (machine key); default: keel-data-UID in TMPDIR or /tmp."""
    prepare: Prepare | None = None
    """Creates the token files from text at the first start."""


class Training(Table):
    """Length, batch, precision and limits of the run."""

    steps: PositiveInt
    """Optimizer step at which training ends (machine key; the schedule's length is lr_schedule.total_steps)."""
    seq_len: PositiveInt
    """Sequence length in tokens."""
    global_batch_size: PositiveInt
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: PositiveInt | Literal["auto"] = 1
    """Sequences that a data-parallel rank computes at once (machine key, but a run key if reduction = "exact"); auto:
    chosen within activation_checkpoint.memory_limit_gib."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights and of the data order."""
    dtype: Dtype = "float32"
    """Data type of parameters and optimizer state. bfloat16 rounds away what changes a weight by less than 1/512, which
    is most of a small lr's updates and all of the usual weight_decay, unless optimizer.rounding = "stochastic"; with
    compute_dtype alone nothing is lost."""
    compute_dtype: Dtype = "float32"
    """Data type of the forward and backward passes."""
    reduce_dtype: Dtype = "float32"
    """Data type in which gradients are accumulated and reduced across ranks."""
    reduction: Literal["fast", "exact"] = "fast"
    """Order of the sums over ranks and micro-batches. fast: the quickest; exact: fixed, so that the data-parallel mesh
    changes no bit; micro_batch_size is then a run key (docs/exactness.md)."""
    tf32: Annotated[
        bool,
        only_with("compute_dtype", "float32"),
        only_with("job.device", "auto", "cuda", reason="which has no TF32"),
    ] = False
    """Multiply float32 matrices in TF32 (10-bit mantissas) on CUDA, which is several times faster."""
    deterministic: Annotated[bool, only_with("job.device", "auto", "cuda", reason="which is deterministic anyway")] = (
        False
    )
    """Use only deterministic kernels on CUDA, so that resuming is bit-exact; slower (machine key)."""
    max_norm: Annotated[float, Field(gt=0)] = 1.0
    """Clip gradients to this global norm; inf: no clipping."""
    norm_type: Annotated[float, Field(ge=1)] = 2.0
    """Exponent p of the gradient norm that max_norm limits; inf: the largest absolute value."""
    loss: Literal["cross_entropy"] | ImportPath = "cross_entropy"
    """What is minimized: the cross-entropy of the next token, or a function of your own (docs/own_models.md)."""
    z_loss_weight: Annotated[NonNegativeFloat, only_with("loss", "cross_entropy")] = 0.0
    """Weight of the z-loss, the mean squared log-partition (PaLM, section 5: 1e-4); 0: off."""
    max_skipped_steps: NonNegativeInt = 10
    """Number of consecutive steps that may be skipped for a non-finite loss or gradient; after more, the run fails."""


class ParameterGroup(Table):
    """Settings for the parameters whose names match a pattern."""

    pattern: Pattern
    """Shell-style pattern of parameter names, e.g. "*.norm.weight"; matching nothing is an error."""
    lr_scale: Annotated[NonNegativeFloat, only_with("freeze", False)] = 1.0
    """Factor applied to the learning rate."""
    weight_decay: Annotated[NonNegativeFloat | None, only_with("freeze", False)] = None
    """Weight decay that replaces optimizer.weight_decay."""
    freeze: bool = False
    """Never train these parameters: no gradient, no weight decay, no optimizer state."""
    freeze_until_step: Annotated[NonNegativeInt, only_with("freeze", False)] = 0
    """Number of first steps in which these parameters are not trained; their optimizer state exists, all zero."""


class Optimizer(Table):
    """The update rule."""

    name: Literal["adamw", "ademamix", "lion", "muon"] | ImportPath = "adamw"
    """adamw; ademamix: AdamW with a second, slow average of gradients; lion (half the state; lr 3 to 10 times smaller);
    muon: Muon for the blocks' matrices, AdamW for the rest; or a rule of your own (docs/own_models.md), or a class of
    torch optimizers that updates each element by itself, such as "torch.optim:Adamax" (docs/optimizers.md)."""
    lr: PositiveFloat
    """Peak learning rate."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """Decay rates of the first and second moments; lion's are of the update and of the momentum: [0.9, 0.99]."""
    eps: PositiveFloat = 1e-8
    """Term added to the square root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices; vectors (norms) have none unless a group sets it."""
    weight_decay_by: Literal["lr", "schedule"] = "lr"
    """What a step multiplies weight_decay by. lr: the learning rate; schedule: the learning rate as a share of its
    peak, so that the decay does not depend on lr (Wortsman et al. 2023); weight_decay is then about 1e-4."""
    cautious_weight_decay: Annotated[bool, only_with("name", "ademamix", "lion", "muon")] = False
    """Decay only elements that the update moves towards zero (Chen et al. 2025); with muon, of its own matrices."""
    moments_dtype: Annotated[
        Literal["float32", "bfloat16"],
        only_with("name", "adamw", reason="whose momentum is not rounded"),
        only_with("training.dtype", "float32", "float64", reason="and so are the moments"),
    ] = "float32"
    """Type of AdamW's moments; bfloat16 halves their memory, and rounds them stochastically, the same on any mesh;
    float32 stands for training.dtype if that is another type."""
    rounding: Annotated[
        Literal["nearest", "stochastic"],
        only_with("name", "adamw", "muon", reason="whose update is not rounded so"),
        only_with("training.dtype", "bfloat16", reason="whose weights need no such rounding"),
    ] = "nearest"
    """How an update rounds weights and AdamW's moments in bfloat16. nearest: what changes a weight by less than 1/512
    is lost; stochastic: it is right on average, the same on any mesh."""
    kernel: Literal["auto", "torch"] = "auto"
    """AdamW's kernel; auto: Keel's own on a GPU, for float32 parameters, where Triton and a C compiler are installed,
    otherwise torch's; torch: always torch's (machine key)."""
    momentum: Annotated[float, Field(ge=0, lt=1), only_with("name", "muon", EXAMPLE)] = 0.95
    """Decay rate of the momentum."""
    nesterov: Annotated[bool, only_with("name", "muon")] = True
    """Look ahead: orthogonalize the gradient with the momentum that already has it, instead of the momentum."""
    orthogonalization: Annotated[Literal["newton_schulz", "polar_express"], only_with("name", "muon")] = "newton_schulz"
    """Polynomials of Muon's five iterations. newton_schulz: one, Jordan's, which leaves singular values of 0.7 to 1.2;
    polar_express: each the best after those before it, which come closer to 1 (Amsel et al. 2025)."""
    split_heads: Annotated[bool, only_with("name", "muon")] = False
    """Orthogonalize the rows of each head of q_proj, k_proj and v_proj by themselves."""
    neuron_beta: Annotated[float | None, Field(ge=0, lt=1), only_with("name", "muon")] = None
    """Decay rate of an average of each row's squares, by whose root the row of Muon's update is divided (NorMuon, Li et
    al. 2025, which takes 0.95): all neurons then move alike; not set: no such average."""
    qk_clip: PositiveFloat | None = None
    """Largest attention logit. A head above it has the weights of its queries and keys scaled down after the step
    (QK-clip, Kimi K2, 2025, which takes 100); not set: logits are not computed."""
    slow_beta: Annotated[float, Field(gt=0, lt=1), only_with("name", "ademamix")] = 0.9999
    """Decay rate of AdEMAMix's slow average."""
    slow_weight: Annotated[NonNegativeFloat, only_with("name", "ademamix")] = 5.0
    """Weight of the slow average in the update, beside 1 of the fast one."""
    slow_warmup_steps: Annotated[NonNegativeInt, only_with("name", "ademamix")] = 0
    """Steps over which the slow average's decay rate and weight grow from the fast one's and from 0; the paper takes
    all steps of the run; 0: none."""
    options: Annotated[dict[str, Any], only_with("name", EXAMPLE)] = Field(
        default={}, json_schema_extra={"additionalProperties": True}
    )
    """Further arguments of a class of torch optimizers, e.g. decoupled_weight_decay of "torch.optim:NAdam"."""
    groups: list[ParameterGroup] = []
    """Parameters with separate settings; the first pattern that matches a name applies."""


WITH_FINAL_DECAY = ("warmup_stable_decay", "inverse_sqrt", "power")
"""The schedules that decay in their last `decay_steps`."""


class LrSchedule(Table):
    """Learning rate over the steps."""

    name: Literal["cosine", "linear", "warmup_stable_decay", "constant", "inverse_sqrt", "power"] | ImportPath = (
        "cosine"
    )
    """Shape after the warm-up; or a function of your own (docs/own_models.md)."""
    warmup_steps: Annotated[NonNegativeInt, only_with("total_steps")] = 0
    """Steps of linear warm-up to the peak learning rate."""
    total_steps: PositiveInt | None = None
    """Step at which the learning rate reaches its minimum; later steps keep it. Either this or total_tokens is set."""
    decay_steps: Annotated[NonNegativeInt | None, only_with("total_steps"), only_with("name", *WITH_FINAL_DECAY)] = None
    """Length of the final decay in steps; default: a tenth of total_steps. 0: no decay, also after total_steps."""
    warmup_tokens: Annotated[NonNegativeInt, only_with("total_tokens")] = 0
    """The same as warmup_steps in tokens, for a schedule that does not depend on the tokens of a step."""
    total_tokens: PositiveInt | None = None
    """The same as total_steps in tokens, which then measure the schedule."""
    decay_tokens: Annotated[NonNegativeInt | None, only_with("total_tokens"), only_with("name", *WITH_FINAL_DECAY)] = (
        None
    )
    """The same as decay_steps in tokens."""
    decay_shape: Annotated[Literal["linear", "cosine", "one_minus_sqrt"], only_with("name", *WITH_FINAL_DECAY)] = (
        "linear"
    )
    """Shape of the final decay; one_minus_sqrt falls fast at first."""
    exponent: Annotated[PositiveFloat, only_with("name", "power")] = 0.51
    """Power of the step with which the learning rate falls before the final decay; 0.5 for inverse_sqrt."""
    min_lr_ratio: Annotated[
        Fraction, only_with("name", "cosine", "linear", *WITH_FINAL_DECAY, EXAMPLE, reason="which has no minimum")
    ] = 0.1
    """Final learning rate as a fraction of the peak."""


class Average(Table):
    """An average of the weights, kept beside them: an exponential one, or the mean of the last (docs/evaluation.md)."""

    interval: NonNegativeInt = 0
    """Steps between updates of the average; 0: none is kept."""
    decay: Annotated[
        float,
        Field(ge=0, lt=1),
        only_with("interval", reason="which keeps no average"),
        only_with("last", 0, reason="whose mean has no decay"),
    ] = 0.999
    """Share of the average that an update keeps: it covers about interval / (1 - decay) steps, so keep that well below
    the length of the run."""
    last: Annotated[NonNegativeInt, only_with("interval", reason="which keeps no average")] = 0
    """Number of updates whose mean is the average (LAWA); each is kept in memory and in checkpoints; 0: the average is
    exponential."""
    start_step: Annotated[NonNegativeInt, only_with("interval", reason="which keeps no average")] = 0
    """The first update, interval steps after this one, copies the weights."""
    dtype: Annotated[Literal["float32", "bfloat16"], only_with("interval", reason="which keeps no average")] = "float32"
    """Type of the average; bfloat16 halves its memory, and rounds an exponential one stochastically, the same on any
    mesh; float32 stands for training.dtype if that is another type."""


class Distillation(Table):
    """A teacher, whose probabilities of the next token are learned beside the text (docs/distillation.md)."""

    teacher: str | None = None
    """A run, or one of its checkpoints, whose model teaches; of a run folder, the newest checkpoint, which must stay
    the same. Its vocabulary must be this model's. May be in object storage. `keel import` makes one of a Hugging Face
    folder."""
    weight: Annotated[Fraction, only_with("teacher", reason="which leaves the text as the only target")] = 0.5
    """Share of the divergence from the teacher in the gradients; the cross-entropy of the text has the rest."""
    temperature: Annotated[PositiveFloat, only_with("teacher", reason="which leaves no logits to divide")] = 1.0
    """Divides the logits of both models in the divergence, which is multiplied by its square (Hinton et al. 2015)."""


class Float8(Table):
    """Float8 matmuls in the blocks, by the package torchao (docs/performance.md)."""

    recipe: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"
    """Scales: one for a tensor (the fastest), one for a row; rowwise_with_gw_hp: rows, and the weights' gradients in
    compute_dtype, so that neither micro_batch_size nor cp changes a value."""
    skip: Annotated[list[Pattern], only_with("recipe", *_FLOAT8)] = []
    """Shell-style patterns of matrices that stay in compute_dtype, e.g. "layers.0.*" or "*.o_proj"; matching nothing is
    an error. Embedding and head always stay."""
    experts: Annotated[bool, only_with("recipe", "rowwise_with_gw_hp")] = False
    """Multiply a mixture's experts in float8, too, with a scale for each row."""
    fsdp_all_gather: Annotated[bool, only_with("recipe", "tensorwise", reason="which has no scale for a tensor")] = (
        False
    )
    """All-gather weights in float8, rounded from training.dtype instead of from compute_dtype."""
    emulate: Annotated[bool, only_with("recipe", *_FLOAT8)] = False
    """Compute with the rounded values in float32, slowly, on any device (machine key)."""


# --------------------------------------------------------------------------- machine tables: how it is computed


class Job(Table):
    """Launch and run folder."""

    name: str
    """Name of the run."""
    output_dir: str | None = None
    """Run folder, or a place in object storage, s3://BUCKET/NAME (docs/buckets.md); default: runs/<job.name>."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one, otherwise the CPU; a GPU that torch's CUDA build can't use is an error."""
    allow_run_change: bool = False
    """Resume although run keys differ from the checkpoint's, and record the change. A different training.seq_len, seed
    or mixture is still refused: it would reorder the samples within an epoch."""
    timeout_seconds: Seconds = 600
    """Time that a rank waits in a collective before the run fails; a hang is reported after half of it."""
    grace_seconds: Seconds = 30
    """Time from a stop signal until the launcher kills (torchrun's --shutdown-timeout); longer steps are abandoned."""

    @property
    def folder(self) -> Path:
        """The run folder; of a run in object storage, the local one that stands for it."""
        return local_folder(self.place) if is_url(self.place) else Path(self.place)

    @property
    def place(self) -> str:
        """What commands call the run: its folder, or its place in object storage."""
        return self.output_dir or f"runs/{self.name}"


class Mesh(Table):
    """How the ranks are arranged; the product of the sizes, except ep, is the number of ranks."""

    dp_replicate: PositiveInt = 1
    """Replicas of the (sharded) model: DDP, or HSDP together with dp_shard."""
    dp_shard: Annotated[int, Field(ge=-1)] = -1
    """Ranks over which FSDP shards parameters; -1: all ranks that the other sizes leave."""
    cp: PositiveInt = 1
    """Context-parallel ranks, each with a part of every sequence; FSDP shards parameters over them as well."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks, with sequence parallelism between the matrix products."""
    pp: PositiveInt = 1
    """Pipeline-parallel ranks, each with some of the layers."""
    ep: PositiveInt = 1
    """Expert-parallel ranks, each with some of the experts; subdivides dp_shard x cp (by owner: dp_replicate x cp),
    adds no ranks."""


class Elastic(Table):
    """How a launch uses the ranks that it finds, whose number may change when hosts are lost or join."""

    enable: bool = False
    """Train on the largest mesh that the ranks and the global batch allow; ranks beyond it wait idle."""
    meshes: Annotated[list[Mesh], only_with("enable", reason="so the mesh is the one of [mesh]")] = []
    """Meshes in order of preference, in place of [mesh]: the first for which there are enough ranks is formed."""


class Fsdp(Table):
    """Fully sharded data parallelism."""

    zero_stage: Annotated[
        Literal[1, 2, 3, "auto"], NotBool, only_with("partition", "rows", reason="which shards no rows")
    ] = 3
    """3: gather parameters for each computation; 2: keep them gathered from forward to backward; 1: to the step's end,
    and reduce gradients once per step; auto: chosen within activation_checkpoint.memory_limit_gib."""
    reshard_after_forward: Annotated[
        Literal["default", "always", "never"],
        only_with(
            "zero_stage", 3, "auto", of="always", reason="which keeps parameters gathered from forward to backward"
        ),
    ] = "default"
    """Free gathered parameters after forward; default: all but the last group's (none if mesh.pp > 1); never: like
    zero_stage = 2. On a single rank: free each group's copies in compute_dtype, by default only if they do not fit."""
    cpu_offload: Annotated[
        bool, only_with("job.device", "auto", "cuda", reason="where the state is in CPU memory anyway")
    ] = False
    """Keep sharded parameters, gradients and optimizer state in CPU memory."""
    accumulate: Annotated[
        Literal["reduce_every", "reduce_last"],
        only_with("zero_stage", 1, 3, "auto", of="reduce_last", reason="which reduces every micro-batch"),
        only_with("training.reduction", "fast", of="reduce_last", reason="which reduces every micro-batch"),
    ] = "reduce_every"
    """reduce_last (always if mesh.pp > 1): reduce gradients once per step; until then they are unsharded."""
    partition: Literal["rows", "owner"] = "rows"
    """rows: shard each parameter; owner: assign whole parameters' optimizer state to dp_replicate x cp ranks (that of
    experts to those that hold them)."""
    owner_broadcast_dtype: Annotated[
        Literal["bfloat16"] | None, only_with("partition", "owner"), only_with("training.dtype", "float32", "float64")
    ] = None
    """Broadcast updated parameters in this type and compute with them; owners keep training.dtype (run key)."""


class Comm(Table):
    """How FSDP's communication overlaps computation (docs/parallelism.md)."""

    streams: Literal["shared", "per_group"] = "shared"
    """Streams for all-gathers. shared: one; per_group: one per process group, so that none waits for another's."""
    prefetch: NonNegativeInt = 1
    """Number of FSDP groups gathered ahead of the one that computes, forward and backward."""
    async_tp: Annotated[bool, only_with("compile.enable", reason="which makes the overlap")] = False
    """Cut tensor-parallel matrix products into parts that overlap with their all-gathers and reductions; off, as the
    start-up summary says, where a tensor-parallel group's GPUs do not reach each other's memory."""
    order_guard_interval: NonNegativeInt = 100
    """Compare the order of collectives across ranks on the first step and then every this many steps; 0: never."""


class Context(Table):
    """Context parallelism: how attention reads the other ranks' parts of a sequence (docs/parallelism.md)."""

    method: Literal["gather", "ring", "all_to_all"] = "gather"
    """gather: all keys and values at once; ring: one rank's at a time; all_to_all: whole sequences, fewer heads."""


class Expert(Table):
    """Expert parallelism: how rows reach their experts (docs/parallelism.md)."""

    exchange: Literal["uneven", "buffers"] = "uneven"
    """uneven: as many rows as there are, for which the host waits in each layer; buffers: of one size, no waiting."""
    buffer_factor: Annotated[float, Field(ge=1), only_with("exchange", "buffers")] = 2.0
    """Size of a buffer over that of an even load. A step for which one is too small is computed again by uneven."""


class Attention(Table):
    """Which kernel computes attention (docs/performance.md)."""

    backend: Literal["auto", "cudnn", "flash2", "flash3", "flex"] = "auto"
    """auto: torch's choice; cudnn; flash2: FlashAttention 2 (on a CPU, torch's own); flash3: FlashAttention 3, an extra
    package for Hopper GPUs; flex: compiled by torch. What can't run is refused."""
    delta_backend: Literal["auto", "torch", "fla"] = "auto"
    """What computes layers of kind delta. torch: its operations, in float32; fla: kernels of flash-linear-attention, an
    extra package, on a GPU in bfloat16; auto: fla where it can run."""


class Pipeline(Table):
    """How pipeline ranks divide the layers and order the micro-batches."""

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble_v"] = "1f1b"
    """gpipe: all forwards first; 1f1b: less memory; interleaved_1f1b, zero_bubble_v: less idle time, more messages."""
    stages_per_rank: Annotated[Annotated[int, Field(ge=2)] | None, only_with("schedule", "interleaved_1f1b")] = None
    """Pipeline stages per rank; default: 2."""
    split: list[PositiveInt] | None = None
    """Number of layers in each stage, in order; default: evenly by cost, including the embedding and the head."""


class ActivationCheckpoint(Table):
    """Which activations the backward pass recomputes instead of keeping (docs/performance.md)."""

    memory_limit_gib: Annotated[
        Gib | Literal["device"],
        only_with("job.device", "auto", "cuda", reason="whose memory is no GPU's", of="device"),
    ] = 0.0
    """Recompute as little as fits a rank's tensors into this many GiB, by estimate; device: nine tenths of the GPU's
    memory; 0: as the other keys say."""
    mode: Annotated[
        Literal["none", "full", "selective", "budget"], only_with("memory_limit_gib", 0, reason="which chooses it")
    ] = "none"
    """none; full: recompute whole blocks; selective: all but some ops; budget: torch.compile's choice."""
    save_ops: Annotated[list[Pattern], only_with("mode", "selective")] = []
    """Ops whose outputs are kept ("aten.mm" means all its overloads); default: the model's list."""
    save_every_nth_matmul: Annotated[PositiveInt, only_with("mode", "selective")] = 1
    """Keep the output of every n-th matrix product of a block, in definition order."""
    every_nth_layer: Annotated[PositiveInt, only_with("mode", "full", "selective")] = 1
    """Checkpoint every n-th of the selected layers."""
    layers: Annotated[str | None, only_with("mode", "full", "selective")] = None
    """Checkpoint only these layers, e.g. "0-15" or "0-3,8-11"; default: all."""
    memory_budget: Annotated[Fraction, only_with("mode", "budget")] = 0.5
    """Fraction of the activation memory of mode = "none" that may be kept."""


class Compile(Table):
    """torch.compile."""

    enable: bool = False
    """Compile every block and the loss."""
    mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
        only_with("enable", reason="which compiles nothing"),
    ] = "default"
    """torch.compile's preset. reduce-overhead: CUDA graphs, on one rank; max-autotune-no-cudagraphs: time variants of
    kernels and take the fastest; max-autotune: both."""


class AfterSave(Table):
    """A command that runs beside the training after a save (docs/evaluation.md)."""

    name: Annotated[str, Field(pattern=r"^[\w-]+$", examples=["export"])]
    """Name in messages, and of the folder in after_save/ for the command's output and its log."""
    command: str
    """Program and arguments, split like a shell's words; not run by a shell. {checkpoint}, {step}, {run} and {output}
    (a folder of its own, which appears when the command succeeds) are replaced. It sees no GPU unless it sets
    CUDA_VISIBLE_DEVICES (env CUDA_VISIBLE_DEVICES=0 PROGRAM ...)."""
    every: PositiveInt
    """Run it after each checkpoint whose step is a multiple of this."""


class Checkpoint(Table):
    """When the state is saved, and from where it is loaded."""

    interval: NonNegativeInt = 500
    """Steps between checkpoints; 0: save only at the end."""
    mode: Literal["sync", "async"] = "async"
    """sync: training waits for the disk; async: training waits only for a copy in memory."""
    load: str | int = "latest"
    """latest: resume from the newest checkpoint, if any; none: start from scratch; or a step or a checkpoint folder to
    begin from (a run with a later checkpoint resumes from that one), or a run folder, for its newest checkpoint (a run
    with checkpoints of its own resumes from those). Folders may be in object storage (docs/buckets.md)."""
    go_back: NonNegativeInt = 0
    """1: go back to load (a step or a folder) although the run has later checkpoints, only once even if the command is
    repeated; 2 to go back another time, and so on."""
    init_from: Annotated[
        str | None, only_with("load", "latest", "none", reason="which the run begins from instead")
    ] = None
    """Another run, or one of its checkpoints, from which a new run takes its initial weights and nothing else; of a run
    folder, the newest checkpoint. May be in object storage. With architecture = "hf" also a Hugging Face folder."""
    keep_last: NonNegativeInt = 0
    """Keep this many of the newest checkpoints and remove older ones; 0: keep all."""
    keep_every: Annotated[NonNegativeInt, only_with("keep_last", reason="which keeps all")] = 0
    """Also keep checkpoints whose step is a multiple of this; 0: off."""
    keep_best: Annotated[NonNegativeInt, only_with("keep_last", reason="which keeps all")] = 0
    """Also keep this many checkpoints with the lowest validation loss."""
    timeout_seconds: Seconds = 1800
    """Time that a save may take, or that a rank waits for another rank's reads or writes, before the run fails."""
    after_save: list[AfterSave] = []
    """Commands that run beside the training after a save, one at a time, such as `keel export`, `keel evaluate` or
    `keel sample`."""


class Validation(Table):
    """Loss on held-out data."""

    interval: NonNegativeInt = 0
    """Steps between validations; 0: no validation."""
    sequences: PositiveInt = 64
    """Sequences per validation."""
    sources: list[Source] = []
    """Data to validate on; of token files a fair sample, the same at every validation and for every seed."""


class Metrics(Table):
    """How metrics are logged."""

    interval: PositiveInt = 10
    """Steps between lines of metrics."""
    tensorboard: bool = True
    """Write TensorBoard files to the run folder."""
    wandb: bool = False
    """Log to Weights & Biases, whose own settings apply (needs the package wandb)."""
    sink: ImportPath | None = None
    """A class of your own that gets every record, as "my_module:MySink" (docs/metrics.md)."""
    fingerprint: bool = False
    """Record a fingerprint of every step's gradients, for `keel replay` and `keel reproduce` to compare with the
    recomputed step's."""
    details_interval: NonNegativeInt = 0
    """Steps between measurements of each layer's gradients and activations, and of the gradient noise scale (up to an
    eighth of a step longer, two steps with a pipeline; docs/metrics.md); 0: never."""


class Profile(Table):
    """Profiler traces."""

    start_step: NonNegativeInt = 0
    """First of the three steps in the profiler's trace, whose names docs/performance.md lists; 0: no trace."""
    memory_snapshot: Annotated[
        bool,
        only_with("start_step", reason="which traces no steps"),
        only_with("job.device", "auto", "cuda", reason="which has no CUDA memory"),
    ] = False
    """Also record CUDA's memory allocations in these steps, for pytorch.org/memory_viz."""


class Spikes(Table):
    """How to handle a step whose loss is far above the preceding ones; depends on the losses only (run table)."""

    action: Literal["none", "skip", "rewind"] = "none"
    """skip: omit the step's update; rewind: go back to a checkpoint and continue with unseen samples, at most three
    times to the same one."""
    threshold: Annotated[PositiveFloat, only_with("action", "skip", "rewind")] = 6.0
    """A loss is a spike if it exceeds the mean of preceding losses by more than this many standard deviations."""
    window: Annotated[int, Field(ge=2), only_with("action", "skip", "rewind")] = 128
    """Number of preceding losses, without spikes, in mean and deviation; before that many, no loss is a spike."""
    rewind_interval: Annotated[PositiveInt, only_with("action", "rewind")] = 500
    """Steps between the checkpoints that rewinding goes back to, saved in addition to [checkpoint]; before the first, a
    spike is skipped."""


class Fault(Table):
    """Which faults are monitored during training, and how they are handled."""

    compare_interval: NonNegativeInt = 100
    """Steps between comparisons of tensors that are replicated across ranks; 0: only before each save."""
    on_difference: Literal["end", "heal"] = "end"
    """When a replica differs: end the run; heal: with three or more replicas, replace it by the majority's."""
    spikes: Spikes = Spikes()
    """Spikes of the loss."""


class Stage(Table):
    """What changes within the run, from a step on: keys under their own names (docs/configs.md)."""

    at_step: PositiveInt | None = None
    """Steps of the run before the stage."""
    at_tokens: PositiveInt | None = None
    """Instead of at_step: the stage begins after the step with which the run has trained on so many tokens."""
    every_steps: PositiveInt | None = None
    """A ramp: the table is several stages, so many steps apart, each with the next value of a list in place of a value,
    such as training.global_batch_size = [32, 64, 128]."""
    model: dict[str, Any] | None = None
    """model.rope_theta, model.rope_scaling."""
    data: dict[str, Any] | None = None
    """data.sources (the whole list), data.document_mask."""
    training: dict[str, Any] | None = None
    """training.seq_len, global_batch_size, micro_batch_size, max_norm, z_loss_weight."""
    optimizer: dict[str, Any] | None = None
    """optimizer.lr, weight_decay, groups (the whole list)."""
    lr_schedule: dict[str, Any] | None = None
    """A schedule that begins with the stage, and has nothing of the one before; without it, that one goes on."""
    validation: dict[str, Any] | None = None
    """Any key of [validation]."""


class Config(Table):
    """A job: the complete configuration of a training run."""

    job: Job
    """Launch and run folder."""
    model: Annotated[
        Annotated[Model, Tag("llama")] | Annotated[HfModel, Tag("hf")] | Annotated[OwnModel, Tag("own")],
        Discriminator(tag_of_model),
    ]
    """Shape of the model."""
    tokenizer: Tokenizer = Tokenizer()
    """How text becomes token ids."""
    data: Data
    """Training data and its proportions."""
    training: Training
    """Length, batch, precision and limits."""
    optimizer: Optimizer
    """The update rule."""
    lr_schedule: LrSchedule
    """Learning rate over the steps."""
    average: Average = Average()
    """Average of the weights."""
    distillation: Distillation = Distillation()
    """Learning from another model."""
    float8: Float8 = Float8()
    """Float8 matmuls."""
    mesh: Mesh = Mesh()
    """Arrangement of the ranks."""
    elastic: Elastic = Elastic()
    """Hosts that are lost or join."""
    fsdp: Fsdp = Fsdp()
    """Fully sharded data parallelism."""
    comm: Comm = Comm()
    """Overlap of communication and computation."""
    context: Context = Context()
    """Context parallelism."""
    expert: Expert = Expert()
    """Expert parallelism."""
    attention: Attention = Attention()
    """Kernel of attention."""
    pipeline: Pipeline = Pipeline()
    """Pipeline parallelism."""
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    """Recomputation in the backward pass."""
    compile: Compile = Compile()
    """torch.compile."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving and resuming."""
    validation: Validation = Validation()
    """Loss on held-out data."""
    metrics: Metrics = Metrics()
    """How metrics are logged."""
    profile: Profile = Profile()
    """Profiler traces."""
    fault: Fault = Fault()
    """Faults of machines and of training."""
    stages: list[Stage] = []
    """Stages of the run after its first."""


_RUN = (
    *("model", "tokenizer", "data", "training", "optimizer", "lr_schedule", "average", "distillation"),
    *("float8", "fault.spikes", "fsdp.owner_broadcast_dtype", "stages"),
)
"""Tables and keys that decide what is learned, except for:"""
BY_CONTENT = ("tokenizer.path", "distillation.teacher")
"""Paths that may change, since what they name may move: its content decides what is learned, and is compared."""
_MACHINE = (
    *BY_CONTENT,
    "data.cache_gib",
    "data.cache_folder",
    "model.max_seq_len",  # told to others by exports
    "training.steps",
    "training.micro_batch_size",
    "training.deterministic",
    "optimizer.kernel",
    "float8.emulate",
)
"""Keys of run tables that only decide how it is computed."""


def is_exact(config: Mapping[str, Any]) -> bool:
    """Whether a config, given as nested tables, has exact reductions."""
    training = config.get("training")
    return isinstance(training, Mapping) and training.get("reduction") == "exact"


def further_run_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The machine keys that a config's run keys make run keys; the config is given as nested tables.

    Exact sums are over micro-batches; some scales of float8 are over all tokens that a rank computes at once.
    """
    float8 = config.get("float8")
    if isinstance(float8, Mapping) and float8.get("recipe") in ("tensorwise", "rowwise"):
        return ("training.micro_batch_size", "mesh.cp")
    return ("training.micro_batch_size",) if is_exact(config) else ()


def is_run_key(key: str, further: Collection[str] = ()) -> bool:
    """Whether a dotted key (`"training.seed"`) or table decides what is learned, so a resume must not change it.

    Args:
        key: the key.
        further: returned by `further_run_keys`.
    """
    is_run = key not in _MACHINE and any(f"{key}.".startswith(f"{each}.") for each in _RUN)
    return is_run or key in further
