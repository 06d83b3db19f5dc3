"""Every key that a job file may hold: one class a table, one attribute a key, its docstring the help text.

The tables are strict (`"100"` is no int, an unknown key is an error) and frozen (nothing changes a config after it
was loaded). *Run tables* say what is learned, *machine tables* how it is computed; `is_run_key` draws the line that
a resume and the checkpoint rely on. Nothing here imports torch: `--help` and `--validate` answer in a fraction of a
second.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from configs.only_with import only_with

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["float32", "bfloat16", "float64"]


class MissingKey(Exception):
    """A key was read from a config that lacks it, since what the job says there is wrong; never leaves configs/."""


class Table(BaseModel):
    """A TOML table: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    if not TYPE_CHECKING:  # or any attribute would pass for one of the table's

        def __getattr__(self, name: str) -> Any:
            """Tell a key that the job lacks from one that the schema does not have, an AttributeError."""
            if name in type(self).model_fields:
                raise MissingKey(f"{type(self).__name__}.{name}")
            return super().__getattr__(name)


# --------------------------------------------------------------------------- run tables: what is learned


class RopeScaling(Table):
    """Llama 3.1's stretch of the rotary frequencies to longer sequences than the model was first trained on."""

    factor: PositiveFloat
    """How many times longer the low frequencies are stretched."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original_seq_len / this are stretched in full."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original_seq_len / this are left as they are."""
    original_seq_len: PositiveInt = 8192
    """Sequence length of the training before the stretch, in tokens."""


class Router(Table):
    """How a mixture of experts chooses the experts of a token, and keeps their load even."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts: shares of all (Mixtral), or each for itself (DeepSeek-V3)."""
    renormalize: bool = True
    """Divide the weights of a token's chosen experts by their sum."""
    load_balance: Literal["auxiliary_loss", "bias", "none"] = "auxiliary_loss"
    """auxiliary_loss: over each sequence (Switch; DeepSeek-V3, eq. 17); bias: on the choice (Wang et al. 2024)."""
    auxiliary_loss_weight: Annotated[PositiveFloat, only_with("load_balance", "auxiliary_loss")] = 0.01
    """Its weight beside the mean cross-entropy; summed over layers, averaged over sequences."""
    bias_update_rate: Annotated[PositiveFloat, only_with("load_balance", "bias")] = 0.001
    """How far an expert's bias moves after each step."""


class Model(Table):
    """Shape of the model."""

    architecture: Literal["llama"] = "llama"
    """Architecture to build: Llama 2 and 3.x; with n_experts Mixtral, DeepSeekMoE and their kin."""
    dim: PositiveInt
    """Width of the residual stream."""
    n_layers: PositiveInt
    """Number of transformer blocks."""
    n_heads: PositiveInt
    """Number of query heads."""
    n_kv_heads: PositiveInt | None = None
    """Number of key and value heads (grouped-query attention); default: n_heads."""
    head_dim: PositiveInt | None = None
    """Width of one head; default: dim / n_heads."""
    ffn_dim: PositiveInt
    """Inner width of the SwiGLU feed-forward."""
    n_experts: Annotated[int, Field(ge=2)] | None = None
    """Experts of a layer's mixture, each a SwiGLU feed-forward; default: dense feed-forwards."""
    experts_per_token: Annotated[PositiveInt, only_with("n_experts")] = 2
    """Experts that each token is sent to."""
    n_shared_experts: Annotated[NonNegativeInt, only_with("n_experts")] = 0
    """Experts beside them that see every token (DeepSeekMoE)."""
    expert_dim: Annotated[PositiveInt | None, only_with("n_experts")] = None
    """Inner width of an expert; default: ffn_dim, which with this key set is that of the dense layers alone."""
    n_dense_layers: Annotated[NonNegativeInt, only_with("n_experts")] = 0
    """First layers that have a dense feed-forward instead of experts."""
    router: Annotated[Router, only_with("n_experts")] = Router()
    """Choice of the experts, and their balance."""
    vocab_size: PositiveInt
    """Number of tokens the model knows; equals the tokenizer's."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies (10,000 in Llama 2, 500,000 in Llama 3)."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1's stretch of the rotary frequencies."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of the RMS norms."""
    tie_embeddings: bool = False
    """Use the embedding's matrix as the output head's, too."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights, before the scaling by depth."""


class Tokenizer(Table):
    """Text to token ids."""

    path: str | None = None
    """A SentencePiece .model, or a tokenizer.json (needs the package `tokenizers`)."""
    train_on: list[str] = []
    """If `path` does not exist yet: train a SentencePiece BPE of model.vocab_size pieces on these texts."""


class Source(Table):
    """One source of samples."""

    name: str
    """Name of the source; the order of its samples is keyed by it."""
    kind: Literal["tokens", "text", "synthetic"]
    """tokens: a folder of token files; text: tokenised while training; synthetic: keyed random tokens."""
    path: Annotated[str | None, only_with("kind", "tokens", "text", reason="whose tokens are read from nowhere")] = None
    """tokens: the folder; text: a file, a folder, or hub:NAME[:CONFIG][@REVISION], a dataset of the Hugging Face hub; a
    run stays with the commit that this stands for at its beginning."""
    weight: PositiveFloat = 1.0
    """Share of the samples that come from here, relative to the other sources."""
    text_key: Annotated[str, only_with("kind", "text")] = "text"
    """The field that holds the text, in .jsonl, .parquet and hub rows."""
    document_length: Annotated[PositiveInt | None, only_with("kind", "synthetic")] = None
    """Mean length of the documents, in tokens; default: a window is one document."""
    virtual_shards: Annotated[PositiveInt, only_with("kind", "text")] = 64
    """Shards that its documents are dealt out to; at least the data-parallel ranks, to divide the tokenizing."""


class Prepare(Table):
    """Token files made from text when a run first needs them."""

    input: list[str]
    """Files, folders, hub:NAME, or python_stdlib (the standard library's source on this machine)."""
    output: str
    """Folder for the token files: OUTPUT/train and OUTPUT/validation. Made if it does not exist yet."""
    validation_fraction: Fraction = 0.0
    """Share of the documents, chosen by a hash of their content, that goes to OUTPUT/validation."""
    max_bad_files: NonNegativeInt = 0
    """How many unreadable or non-UTF-8 files may be left out (each is named) before it is an error."""


class Data(Table):
    """What is read, in which proportions."""

    sources: Annotated[list[Source], Field(min_length=1)]
    """The sources, mixed by weight."""
    document_mask: bool = False
    """Keep the documents in a window apart: no attention across them, positions restart at each."""
    prepare: Prepare | None = None
    """Make the token files from text at the first start."""


class Training(Table):
    """Length, batch, precision and limits of the run."""

    steps: PositiveInt
    """Optimizer steps at which this launch ends (machine key; the schedule's length is lr_schedule.total_steps)."""
    seq_len: PositiveInt
    """Sequence length in tokens."""
    global_batch_size: PositiveInt
    """Sequences an optimizer step, over all ranks."""
    micro_batch_size: PositiveInt = 1
    """Sequences a data-parallel rank computes at once (machine key)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights and of the data order."""
    dtype: Dtype = "float32"
    """Type of parameters and optimizer state."""
    compute_dtype: Dtype = "float32"
    """Type of the forward and backward pass."""
    reduce_dtype: Dtype = "float32"
    """Type in which gradients are accumulated and reduced over ranks."""
    tf32: Annotated[
        bool,
        only_with("compute_dtype", "float32"),
        only_with("job.device", "auto", "cuda", reason="which has no such products"),
    ] = False
    """On CUDA: multiply float32 with 10 bits of each factor, several times faster."""
    deterministic: Annotated[
        bool, only_with("job.device", "auto", "cuda", reason="which gives the same bits every time")
    ] = False
    """On CUDA: only kernels that give the same bits every time, so that a resume is exact; slower (machine key)."""
    max_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this global norm; inf: never."""
    norm_type: Annotated[float, Field(ge=1)] = 2.0
    """The p of the gradient norm that max_norm limits; inf for the largest absolute value."""
    z_loss_weight: NonNegativeFloat = 0.0
    """Weight of the mean squared log-partition added to the loss (PaLM, section 5: 1e-4); 0: none."""
    max_skipped_steps: NonNegativeInt = 10
    """Consecutive steps that may be skipped for a non-finite loss or gradient before the run ends."""


class ParameterGroup(Table):
    """Settings of the parameters whose names match a pattern."""

    pattern: str
    """Shell-style pattern of parameter names, e.g. "*.norm.weight"; matching nothing is an error."""
    lr_scale: Annotated[NonNegativeFloat, only_with("freeze", False)] = 1.0
    """Factor on the learning rate."""
    weight_decay: Annotated[NonNegativeFloat | None, only_with("freeze", False)] = None
    """Weight decay instead of optimizer.weight_decay."""
    freeze: bool = False
    """Never train them: no gradient, no weight decay, no optimizer state."""
    freeze_until_step: Annotated[NonNegativeInt, only_with("freeze", False)] = 0
    """Do not train them in the first so many steps; their optimizer state is there from the start, all zero."""


class Optimizer(Table):
    """The update rule."""

    name: Literal["adamw", "muon"] = "adamw"
    """adamw; muon: Muon for the matrices of the blocks, AdamW for the rest (needs fsdp.partition = "owner")."""
    lr: PositiveFloat
    """Peak learning rate."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """Decay rates of the first and second moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices; vectors (norms) have none unless a group says so."""
    momentum: Annotated[float, Field(ge=0, lt=1), only_with("name", "muon")] = 0.95
    """Decay rate of the momentum."""
    newton_schulz_steps: Annotated[int, Field(gt=0, lt=100), only_with("name", "muon")] = 5
    """Iterations that bring the momentum near an orthogonal matrix."""
    muon_lr_adjustment: Annotated[Literal["match_rms_adamw", "original"], only_with("name", "muon")] = "match_rms_adamw"
    """Factor on lr by a matrix's shape; match_rms_adamw: as large as AdamW's updates, so one lr fits both."""
    groups: list[ParameterGroup] = []
    """Parameters with settings of their own; the first pattern that matches a name counts."""


class LrSchedule(Table):
    """Learning rate over the steps."""

    name: Literal["cosine", "linear", "warmup_stable_decay"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up to the peak."""
    total_steps: PositiveInt
    """Steps after which the learning rate has reached its minimum; later steps keep it."""
    decay_steps: Annotated[PositiveInt | None, only_with("name", "warmup_stable_decay")] = None
    """Length of the final decay in steps; default: a tenth of total_steps."""
    min_lr_ratio: Fraction = 0.1
    """Final learning rate as a share of the peak."""


# --------------------------------------------------------------------------- machine tables: how it is computed


class Job(Table):
    """The launch."""

    name: str
    """Name of the run."""
    output_dir: str | None = None
    """Run folder; default: runs/<job.name>."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one, else cpu."""
    allow_run_change: bool = False
    """Go on from a checkpoint although run keys have changed since; the change is recorded. Another
    training.seq_len, seed or mixture is refused even so: the samples would come in another order within an epoch."""
    timeout_seconds: PositiveInt = 600
    """How long a rank waits in a collective before the run fails; a hang is reported after half of that."""
    grace_seconds: PositiveInt = 30
    """How long after a stop signal the launcher kills: torchrun's --shutdown-timeout. A longer step is not awaited."""

    @property
    def folder(self) -> Path:
        """Where the run writes everything."""
        return Path(self.output_dir or f"runs/{self.name}")


class Mesh(Table):
    """How the ranks are arranged; the sizes multiply to the number of ranks."""

    dp_replicate: PositiveInt = 1
    """Replicas of the (sharded) model: DDP, or HSDP together with dp_shard."""
    dp_shard: Annotated[int, Field(ge=-1)] = -1
    """Ranks over which FSDP shards parameters; -1: what the other sizes leave."""
    cp: PositiveInt = 1
    """Context-parallel ranks, each with its part of every sequence; FSDP shards parameters over them, too."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks, with sequence parallelism between the matrices."""
    pp: PositiveInt = 1
    """Pipeline-parallel ranks, each of which holds some of the layers."""
    ep: PositiveInt = 1
    """Expert-parallel ranks, each with its share of the experts: cuts dp_shard x cp anew, adds no ranks."""


class Fsdp(Table):
    """Fully sharded data parallelism."""

    zero_stage: Annotated[Literal[1, 2, 3], only_with("partition", "rows", reason="which cuts no rows")] = 3
    """3: parameters are gathered only to compute; 2: kept from forward to backward; 1: also until the step's end, and
    gradients are reduced once a step."""
    reshard_after_forward: Annotated[
        Literal["default", "always", "never"],
        only_with("zero_stage", 3, of="always", reason="which keeps parameters gathered from forward to backward"),
    ] = "default"
    """Free gathered parameters after forward; default: all but the last group (none if mesh.pp > 1); never: as
    zero_stage = 2."""
    cpu_offload: Annotated[
        bool, only_with("job.device", "auto", "cuda", reason="where the state is in CPU memory as it is")
    ] = False
    """Keep sharded parameters, gradients and optimizer state in CPU memory."""
    accumulate: Annotated[
        Literal["reduce_every", "reduce_last"],
        only_with("zero_stage", 1, 3, of="reduce_last", reason="which reduces every micro-batch"),
        only_with("zero_stage", 2, 3, of="reduce_every", reason="which reduces once a step"),
    ] = "reduce_every"
    """reduce_last (with mesh.pp > 1 always): reduce gradients once a step; until then they are kept unsharded."""
    partition: Literal["rows", "owner"] = "rows"
    """owner: shares whole parameters' optimizer state out to the dp_replicate x cp ranks, instead of cutting rows."""
    owner_broadcast_dtype: Annotated[
        Literal["bfloat16"] | None, only_with("partition", "owner"), only_with("training.dtype", "float32", "float64")
    ] = None
    """Send updated parameters, and compute with them, rounded to this; owners keep training.dtype (run key)."""


class SimulatedGroup(Table):
    """Other delays for the FSDP groups of one process group."""

    shards_over: str
    """Dimension of the mesh over which its groups are sharded: "shard" is dp_shard x cp."""
    all_gather_milliseconds: NonNegativeFloat = 0.0
    """As comm.simulate.all_gather_milliseconds, for these groups."""
    reduce_scatter_milliseconds: NonNegativeFloat = 0.0
    """As comm.simulate.reduce_scatter_milliseconds, for these groups."""


class Simulate(Table):
    """Delays that stand for a network, to measure without one how far communication overlaps computation."""

    all_gather_milliseconds: NonNegativeFloat = 0.0
    """Added to every all-gather of FSDP, in its stream; 0: none."""
    reduce_scatter_milliseconds: NonNegativeFloat = 0.0
    """Added to every reduce-scatter of FSDP, in its stream (on a CPU the computation waits, too); 0: none."""
    groups: list[SimulatedGroup] = []
    """Process groups with delays of their own."""


class Comm(Table):
    """How FSDP's communication is issued beside the computation (docs/communication.md)."""

    streams: Literal["shared", "per_group"] = "shared"
    """Queue of the all-gathers. shared: one; per_group: one a process group, so that none waits for another's."""
    prefetch_forward: NonNegativeInt = 1
    """FSDP groups gathered ahead of the one that computes, in the forward pass."""
    prefetch_backward: NonNegativeInt = 1
    """The same in the backward pass."""
    order_guard_interval: NonNegativeInt = 100
    """Compare the order of collectives across ranks on the first step of a launch and then every so many; 0: never."""
    simulate: Simulate = Simulate()
    """Delays in place of a network."""


class Context(Table):
    """Context parallelism: how attention sees the other ranks' part of the sequence (docs/context_parallelism.md)."""

    method: Literal["gather", "ring", "all_to_all"] = "gather"
    """gather: all keys and values at once; ring: one rank's after another; all_to_all: whole sequence, fewer heads."""


class Pipeline(Table):
    """How mesh.pp ranks share the layers, and in which order they compute the micro-batches."""

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble_v"] = "1f1b"
    """gpipe: all forwards first; 1f1b: less memory; interleaved_1f1b, zero_bubble_v: less idle time, more messages."""
    stages_per_rank: Annotated[Annotated[int, Field(ge=2)] | None, only_with("schedule", "interleaved_1f1b")] = None
    """Stages on each rank; default: 2."""
    split: list[PositiveInt] | None = None
    """Layers of each stage, in order; default: evenly by their cost, the embedding and the head counted."""


class ActivationCheckpoint(Table):
    """What the backward pass recomputes instead of keeping it."""

    mode: Literal["none", "full", "selective", "budget"] = "none"
    """none; full: whole blocks; selective: all but chosen ops; budget: chosen by torch.compile's partitioner."""
    save_ops: Annotated[list[str], only_with("mode", "selective")] = []
    """Ops whose outputs are kept ("aten.mm" means all its overloads); default: the model's own list."""
    save_every_nth_matmul: Annotated[PositiveInt, only_with("mode", "selective")] = 1
    """Of the block's matrices, in the order of their names' definition, keep the output of every n-th."""
    every_nth_layer: Annotated[PositiveInt, only_with("mode", "full", "selective")] = 1
    """Checkpoint only every n-th of the layers selected."""
    layers: Annotated[str | None, only_with("mode", "full", "selective")] = None
    """Checkpoint only these layers, e.g. "0-15" or "0-3,8-11"."""
    memory_budget: Annotated[Fraction, only_with("mode", "budget")] = 0.5
    """Share of the activation memory of mode none that may be kept."""


class Compile(Table):
    """torch.compile."""

    enable: bool = False
    """Compile every block, and the loss."""


class Checkpoint(Table):
    """When the state is saved, and from where it is taken up."""

    interval: NonNegativeInt = 500
    """Steps between checkpoints; 0: only at the end."""
    mode: Literal["sync", "async"] = "async"
    """sync: training waits for the disk; async: it waits only for a copy in memory."""
    load: str | int = "latest"
    """latest: go on from the newest checkpoint, if any; none: start anew; or a step, or a checkpoint's folder, to begin
    from: a run that has a later checkpoint of its own goes on from that one."""
    go_back: NonNegativeInt = 0
    """1: go back to load (a step or a folder) although the run has later checkpoints; once, also if the command is
    repeated. The next time 2, and so on."""
    interval_minutes: NonNegativeFloat = 0.0
    """Minutes after which a checkpoint is due in any case, beside interval; 0: never."""
    init_from: Annotated[
        str | None, only_with("load", "latest", "none", reason="which the run goes on from instead")
    ] = None
    """Folder of another run's checkpoint whose weights (nothing else) a run takes when it starts anew."""
    verify: Literal["size", "hash"] = "hash"
    """Before loading: compare the size of every file; hash: its content, too, which reads everything twice."""
    on_damage: Literal["fall_back", "stop"] = "fall_back"
    """If the newest checkpoint is damaged: go on from the one before, or stop."""
    keep_last: NonNegativeInt = 0
    """Newest checkpoints that are kept, older ones are removed; 0: all."""
    keep_every: Annotated[NonNegativeInt, only_with("keep_last", reason="which keeps all")] = 0
    """Steps of which every multiple is kept for ever; 0: none is for that reason."""
    keep_best: Annotated[NonNegativeInt, only_with("keep_last", reason="which keeps all")] = 0
    """Checkpoints of lowest validation loss that are kept, too."""
    max_save_failures: PositiveInt = 3
    """Failed saves in a row (a full disk) at which the run ends; until then it goes on without a new checkpoint."""
    timeout_seconds: PositiveInt = 1800
    """How long a save may take, or a rank wait for another that writes or reads, before the run fails."""
    export_every: NonNegativeInt = 0
    """Steps of whose checkpoints every multiple is also written as a Hugging Face folder, to exports/; 0: none."""
    optimizer_dtype: Annotated[
        Literal["same", "bfloat16"], only_with("training.dtype", "float32", "float64", reason="as its moments are, too")
    ] = "same"
    """bfloat16: save the optimizer's moments rounded; smaller, but a resumed run is not exactly the same any more."""


class Validation(Table):
    """Loss on text that is not trained on."""

    interval: NonNegativeInt = 0
    """Steps between validations; 0: none."""
    sequences: PositiveInt = 64
    """Sequences a validation."""
    sources: list[Source] = []
    """What is read; of token files a fair sample, the same at every validation and under every seed."""


class Metrics(Table):
    """What is logged."""

    interval: PositiveInt = 10
    """Steps between two lines of metrics."""
    tensorboard: bool = True
    """Write TensorBoard files to the run folder."""


class Profile(Table):
    """Traces for performance work."""

    start_step: NonNegativeInt = 0
    """Step at which the profiler starts; 0: never."""
    steps: PositiveInt = 3
    """Steps that the trace covers."""
    memory_snapshot: Annotated[
        bool,
        only_with("start_step", reason="which leaves no steps to trace"),
        only_with("job.device", "auto", "cuda", reason="which has no CUDA memory"),
    ] = False
    """Record allocations over the steps of the trace (CUDA), for pytorch.org/memory_viz."""


class Spikes(Table):
    """What becomes of a step whose loss is far above those before it; decided by the losses alone (run table)."""

    action: Literal["none", "skip", "rewind"] = "none"
    """skip: leave the step's update out; rewind: go back to a checkpoint, and on with samples not yet seen."""
    threshold: Annotated[PositiveFloat, only_with("action", "skip", "rewind")] = 6.0
    """A loss is a spike if it exceeds the mean of the losses before it by more than so many standard deviations."""
    window: Annotated[int, Field(ge=2), only_with("action", "skip", "rewind")] = 128
    """Steps over which mean and deviation are taken, spikes left out; before there are so many, nothing is a spike."""
    rewind_interval: Annotated[PositiveInt, only_with("action", "rewind")] = 500
    """Steps at whose multiples a checkpoint is saved, beside [checkpoint], of which the newest is gone back to;
    before there is one, a spike is skipped."""
    max_rewinds: Annotated[PositiveInt, only_with("action", "rewind")] = 3
    """How often in a row the run goes back to the same checkpoint before it ends instead."""


class Fault(Table):
    """What is watched for while a run trains, and what is done about it."""

    lag_ratio: NonNegativeFloat = 0.2
    """Name the slowest rank once it keeps the others waiting for more than this part of a step; 0: never."""
    trace_nonfinite: bool = True
    """Compute a skipped step again, the first of a row, to name the module and rank where it went wrong."""
    compare_interval: NonNegativeInt = 100
    """Steps between comparisons of the tensors of which several ranks hold copies; 0: only before every save."""
    on_difference: Literal["end", "heal"] = "end"
    """A copy differs: end the run; heal: of three copies or more, give those that differ what the majority has."""
    spikes: Spikes = Spikes()
    """Jumps of the loss."""


class Config(Table):
    """A job: everything that Keel needs to know to train a model."""

    job: Job
    """The launch."""
    model: Model
    """Shape of the model."""
    tokenizer: Tokenizer = Tokenizer()
    """Text to token ids."""
    data: Data
    """What is read."""
    training: Training
    """Length, batch, precision and limits."""
    optimizer: Optimizer
    """The update rule."""
    lr_schedule: LrSchedule
    """Learning rate over the steps."""
    mesh: Mesh = Mesh()
    """Arrangement of the ranks."""
    fsdp: Fsdp = Fsdp()
    """Fully sharded data parallelism."""
    comm: Comm = Comm()
    """Communication beside the computation."""
    context: Context = Context()
    """Context parallelism."""
    pipeline: Pipeline = Pipeline()
    """Pipeline parallelism."""
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    """What backward recomputes."""
    compile: Compile = Compile()
    """torch.compile."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving and resuming."""
    validation: Validation = Validation()
    """Loss on held-out text."""
    metrics: Metrics = Metrics()
    """What is logged."""
    profile: Profile = Profile()
    """Traces for performance work."""
    fault: Fault = Fault()
    """Faults of machines and of training."""


RUN_TABLES = ("model", "tokenizer", "data", "training", "optimizer", "lr_schedule")
MACHINE_KEYS_IN_RUN_TABLES = ("training.steps", "training.micro_batch_size", "training.deterministic")
RUN_KEYS_IN_MACHINE_TABLES = ("fsdp.owner_broadcast_dtype", "fault.spikes")
"""Keys, and tables with all their keys."""


def is_run_key(key: str) -> bool:
    """Whether a dotted key (`"training.seed"`) or table decides what is learned, and so must not change on a resume."""
    if key.split(".")[0] in RUN_TABLES:
        return key not in MACHINE_KEYS_IN_RUN_TABLES
    return any(f"{key}.".startswith(f"{run_key}.") for run_key in RUN_KEYS_IN_MACHINE_TABLES)
