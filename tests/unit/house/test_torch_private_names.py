"""Every private name of torch outside parallelisms/torch_internals.py: what a new version of torch can break."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

FLOORS = ("configs", "models", "parallelisms", "checkpoint", "trainer", "scripts")

FAKE_TENSORS = "torch._subclasses.fake_tensor.FakeTensorMode"
DISPATCH = "torch.utils._python_dispatch.TorchDispatchMode"
LEAVES = "torch.utils._pytree.tree_leaves"
OWN_ATTENTION = "torch.ops.keel._scaled_dot_product_document_attention"
COLLECTIVES = "torch.ops._c10d_functional"
ATTENTION_ON_A_CPU = "aten._scaled_dot_product_flash_attention_for_cpu"
ATTENTION = {
    "aten._flash_attention_forward",
    "aten._flash_attention_backward",
    ATTENTION_ON_A_CPU,
    f"{ATTENTION_ON_A_CPU}_backward",
}

NAMES = {
    "checkpoint/index.py": {"torch.distributed.checkpoint.filesystem._StorageInfo"},
    "checkpoint/store.py": {"*._slice_file"},
    "checkpoint/tensor_stream.py": {
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.utils._create_file_view",
    },
    "models/documents.py": {"torch._dynamo.maybe_mark_dynamic"} | ATTENTION,
    "models/hf/attention.py": {"*._attn_implementation", "*._supports_attention_backend", "*._supports_flex_attn"},
    "models/hf/experts.py": {"*._apply_gate"},
    "models/hf/initial_values.py": {
        *("*._buffers", "*._parameters", "*._version"),
        "torch.utils._device._device_constructors",
    },
    "models/hf/model.py": {"*._head", "*._modules", "*._non_persistent_buffers_set"},
    "models/hf/stages.py": {
        *("torch._subclasses.fake_tensor.FakeTensorMode", "torch.utils._pytree.tree_leaves"),
    },
    "models/random_numbers.py": {"torch.utils._python_dispatch.TorchDispatchMode"},
    "parallelisms/activation_checkpoint.py": {"torch._C._dispatch_get_all_op_names", "torch._functorch.config"},
    "parallelisms/attention/backend.py": {
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_cudnn_attention_backward",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_backward",
        ATTENTION_ON_A_CPU,
        f"{ATTENTION_ON_A_CPU}_backward",
        "torch._fused_sdp_choice",
    },
    "parallelisms/attention/blocked.py": ATTENTION,
    "parallelisms/attention/context.py": {COLLECTIVES, OWN_ATTENTION},
    "parallelisms/attention/halo.py": {COLLECTIVES},
    "parallelisms/attention/logits.py": {COLLECTIVES},
    "parallelisms/compile.py": {
        *("torch._dynamo.exc.BackendCompilerFailed", "torch._dynamo.exc.FailOnRecompileLimitHit"),
        "torch._dynamo.exc.TorchDynamoException",
        *("torch._inductor.exc.CppCompileError", "torch._inductor.list_mode_options"),
    },
    "parallelisms/compute_copies.py": {"torch._foreach_copy_"},
    "parallelisms/expert.py": {
        COLLECTIVES,
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    },
    "parallelisms/grad_norm.py": {"torch._foreach_mul_", "torch._foreach_norm"},
    "parallelisms/fake_ranks.py": {"torch.testing._internal.distributed.fake_pg.FakeStore"},
    "parallelisms/float8.py": {"*._local_tensor"},
    "parallelisms/float8_experts.py": {COLLECTIVES},
    "parallelisms/init.py": {"*._non_persistent_buffers_set"},
    "parallelisms/mesh.py": {"*._flatten", "*._unflatten"},
    "parallelisms/owned_parameter.py": {"*._version"},
    "parallelisms/owner_partition.py": {"torch._foreach_copy_"},
    "parallelisms/ranges.py": {"torch.autograd._profiler_enabled"},
    "parallelisms/symmetric_memory.py": {"torch.distributed._symmetric_memory.enable_symm_mem_for_group"},
    "parallelisms/tensor.py": {"*._apply", "*._prepare_input_fn"},
    "parallelisms/tensor_whole.py": {"*._parameters", "torch.distributed._functional_collectives"},
    "parallelisms/whole_matrices.py": {"torch._foreach_copy_"},
    "scripts/parity_reference.py": {"torch.optim._muon._zeropower_via_newtonschulz"},
    "scripts/parity_compare.py": {FAKE_TENSORS, "torch._functorch.config.patch", ATTENTION_ON_A_CPU},
    "scripts/proving/own_types.py": {DISPATCH, LEAVES},
    "trainer/kernels/padded.py": {"torch._foreach_copy_"},
    "trainer/average.py": {
        "torch._foreach_add_",
        "torch._foreach_copy_",
        "torch._foreach_mul_",
        "torch._foreach_sub",
    },
    "trainer/optimizers/adamw.py": {"torch._foreach_copy_"},
    "trainer/optimizers/lion.py": {
        "torch._foreach_add_",
        "torch._foreach_copy_",
        "torch._foreach_mul",
        "torch._foreach_mul_",
        "torch._foreach_sign_",
        "torch._foreach_sub_",
    },
    "trainer/optimizers/training.py": {"torch._foreach_mul_"},
    "trainer/numerics.py": {"torch._inductor.config"},
    "trainer/planning/activations.py": {FAKE_TENSORS},
    "trainer/planning/block_memory.py": {DISPATCH, LEAVES, "*._cdata"},
    "trainer/planning/compiled_block.py": {
        LEAVES,
        "torch._functorch.config",
        "torch._inductor.decomposition.select_decomp_table",
        "torch._ops.OpOverload",
        "torch.utils._pytree.tree_flatten",
        "torch.utils._pytree.tree_unflatten",
    },
    "trainer/planning/pipeline_order.py": {"torch.distributed.pipelining._schedule_visualizer.get_schedule_ops"},
    "trainer/planning/traffic.py": {
        FAKE_TENSORS,
        DISPATCH,
        LEAVES,
        "*._qualified_op_name",
        "*._PipelineSchedule",
        "*._inference_mode",
    },
    "trainer/stages.py": {"*._non_persistent_buffers_set"},
    "trainer/report/profile.py": {"torch.cuda.memory._dump_snapshot", "torch.cuda.memory._record_memory_history"},
}
"""By file; `*`: of an object of torch's. A new one is avoided where there is a public way, else listed here."""
OWN = ("self.", "cls.", "os.", "_Index.")
"""Of objects that are not torch's."""


def private_names(path: Path) -> set[str]:
    """Those of torch that a file uses."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("torch")}
        elif isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
            found.add(_shown(ast.unparse(node)))
    private = {name for name in found if any(part.startswith("_") for part in name.split(".")) and name}
    return {name for name in private if not any(other.startswith(f"{name}.") for other in private)}


def _shown(name: str) -> str:
    name = name.removeprefix("torch.ops.") if name.startswith("torch.ops.aten.") else name
    if re.fullmatch(r"(torch|aten)(\.\w+)+", name):
        return name
    last = name.rpartition(".")[2]
    return f"*.{last}" if last.startswith("_") and not name.startswith(OWN) else ""


@pytest.mark.parametrize("floor", FLOORS)
def test_all_are_listed(floor):
    found = {path.relative_to(ROOT).as_posix(): private_names(path) for path in (ROOT / floor).rglob("*.py")}
    found.pop("parallelisms/torch_internals.py", None)
    assert {path: names for path, names in found.items() if names} == {
        path: names for path, names in NAMES.items() if path.startswith(f"{floor}/")
    }


def test_all_are_there():
    importlib.import_module("models.documents")  # which makes Keel's own operation
    dotted = {name for names in NAMES.values() for name in names if not name.startswith("*")}
    for name in dotted:
        parts = (f"torch.ops.{name}" if name.startswith("aten.") else name).split(".")
        thing, rest = importlib.import_module("torch"), parts[1:]
        for i, part in enumerate(rest):
            thing = getattr(thing, part, None) or importlib.import_module(".".join(parts[: i + 2]))
        assert thing is not None, name
