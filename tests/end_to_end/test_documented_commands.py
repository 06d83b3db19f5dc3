"""Every command of README.md and docs/ is run as a reader would run it, in order, in a copy of the checkout.

Lines of `sh` blocks, indented commands and commands in the text are run by bash as they stand; `toml` blocks are put
into a job file, which must be valid; `python` blocks are run. What is not run as it stands is in the tables below, with
the reason, so that nothing that is new in the docs escapes: it is run, or fails.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end.launch import ENVIRONMENT, ROOT, curve, records, status
from tests.preloaded import SOCKET, Server

TIMEOUT_SECONDS = 900

# 16 sequences of 256 tokens are cut to 4 of 32, so that a step takes a twentieth; a validation to 8. Nothing else is.
BATCH = "--training.global_batch_size 4 --training.micro_batch_size 2 --training.seq_len 32 --validation.sequences 8"
TINY_8B = (
    "--model.dim 64 --model.n_layers 2 --model.n_heads 8 --model.n_kv_heads 4 --model.ffn_dim 128"
    " --model.vocab_size 512 --training.steps 2 --training.global_batch_size 2 --compile.enable false"
    """ --data.sources '[{name = "random", kind = "synthetic"}]' --tokenizer.path runs/data/tiny.model"""
    " --tokenizer.train_on '[\"my_text\"]'"
)
TINY_1B = (  # what the first recipe's model and batch are cut to
    "--training.seq_len 64 --training.global_batch_size 4 --training.micro_batch_size 2 --validation.interval 2"
    " --validation.sequences 4 --checkpoint.interval 2 --compile.enable false"
    " --model.dim 64 --model.n_layers 2 --model.n_heads 8 --model.n_kv_heads 4 --model.ffn_dim 128"
    " --model.vocab_size 1000"
)

INSTEAD = {  # what is run in the place of a line: the cuts, all of them
    "torchrun train.py --config debug.toml": f"torchrun train.py --config debug.toml {BATCH}"
    " --training.micro_batch_size 4 && cp -r runs/debug runs/debug-300",
    # Each of the next two goes on from step 300, for a few steps; and the first from none, past the guarded step 101.
    "torchrun --nproc-per-node 2 train.py --config debug.toml --training.steps 600": "torchrun --nproc-per-node 2"
    f" train.py --config debug.toml --training.steps 304 {BATCH} && torchrun --nproc-per-node 2"
    f" train.py --config debug.toml --training.steps 104 {BATCH} --job.output_dir runs/debug-2",
    "torchrun --nproc-per-node 4 train.py --config debug.toml --training.steps 600 --mesh.tp 2": "rm -r runs/debug"
    " && mv runs/debug-300 runs/debug && torchrun --nproc-per-node 4 train.py --config debug.toml --training.steps 304"
    f" --mesh.tp 2 {BATCH}",
    "tensorboard --logdir runs/debug/tensorboard": "tensorboard --inspect --logdir runs/debug/tensorboard",  # no server
    # Less text, and so fewer pieces.
    "python scripts/train_tokenizer.py my_text/ --output runs/data/mine.model --vocab-size 32000": "mkdir my_text"
    f" && cp {os.path.dirname(os.__file__)}/*.py my_text/ && python scripts/train_tokenizer.py my_text/"
    " --output runs/data/mine.model --vocab-size 1000",
    "python scripts/prepare_data.py my_text/ --output runs/data/mine --tokenizer runs/data/mine.model"
    " --validation-fraction 0.01": "python scripts/prepare_data.py my_text/ --output runs/data/mine"
    " --tokenizer runs/data/mine.model --validation-fraction 0.1",
    "python train.py --config my_text.toml": f"python train.py --config my_text.toml {BATCH} --training.steps 2"
    " --model.vocab_size 1000",
    'python scripts/parity.py --rows "FSDP 2 x TP 2*"': 'python scripts/parity.py --rows "FSDP 2 x TP 2, none, eager*"',
    "keel compare debug.toml --sweep optimizer.name=adamw,muon --seeds 3": "keel compare debug.toml"
    f" --sweep optimizer.name=adamw,muon --seeds 1 --training.steps 2 {BATCH}",
    'python scripts/parity.py --rows "CP*"': 'python scripts/parity.py --rows "CP 2, gather, eager"',
    'python scripts/parity.py --rows "MoE*"': "python scripts/parity.py --list",  # rows are tests of their own
    "python scripts/plan.py --config llama_7b.toml --ranks 8 --trace --optimizer.name muon": "python scripts/plan.py"
    " --config debug.toml --ranks 2 --trace --optimizer.name muon",
    'python scripts/parity.py --rows "Muon, *"': "python scripts/parity.py --list",
    'python scripts/parity.py --rows "*EP *"': "python scripts/parity.py --list",
    'python scripts/parity.py --rows "float8*"': "python scripts/parity.py --list",
    # In the environment of the tests Keel need not be installed; tests/end_to_end/test_install.py installs it.
    "keel train debug.toml --ranks 2": "python scripts/keel.py train debug.toml --ranks 2 --validate",
    'keel sample runs/debug "def main(" --max-tokens 32': "python scripts/keel.py sample runs/debug"
    ' "def main(" --max-tokens 9',
    "python scripts/sample.py runs/debug --file prompts.txt --max-tokens 40 --seed 1": "printf 'a\\nclass A:\\n'"
    " | python scripts/sample.py runs/debug --file - --max-tokens 9 --seed 1",
    "python train.py --config debug.toml --metrics.fingerprint true --job.output_dir runs/proven": "python train.py"
    f" --config debug.toml {BATCH} --metrics.fingerprint true --job.output_dir runs/proven --training.steps 6"
    " --checkpoint.interval 3 --metrics.interval 2 --validation.interval 0",
    "python scripts/replay.py runs/proven --step 120": "python scripts/replay.py runs/proven --step 5",
    "python scripts/replay.py runs/proven --step 101 --ranks 2 --mesh.tp 2": "python scripts/replay.py"
    " runs/proven --step 4 --ranks 2 --mesh.tp 2",
    "python scripts/parity.py --random 200 --seed 1": "python scripts/parity.py --random 2 --seed 1",
    "python scripts/replay.py runs/proven --random 5 --seed 1": "python scripts/replay.py runs/proven --random 1",
    "keel fork": "keel fork --help",
    "keel prepare chats.jsonl --output runs/data/chats --tokenizer runs/data/python_stdlib_4096.model"
    ' --validation-fraction 0.1 --mask-until "<|assistant|>" --mask-after "<|end|>"': "python -c"
    """ 'for i in range(200): print("{\\"text\\": \\"%d?<|assistant|>%d.<|end|>\\"}" % (i, i))' > chats.jsonl"""
    " && keel prepare chats.jsonl --output runs/data/chats --tokenizer runs/data/python_stdlib_4096.model"
    ' --validation-fraction 0.1 --mask-until "<|assistant|>" --mask-after "<|end|>" | grep "give loss"',
    "keel prepare pairs.jsonl --output runs/data/pairs --tokenizer runs/data/python_stdlib_4096.model"
    " --prompt-key prompt --text-key completion": "python -c"
    """ 'for i in range(99): print("{\\"prompt\\": \\"%d?\\", \\"completion\\": \\" %d.\\"}" % (i, i))' > pairs.jsonl"""
    " && keel prepare pairs.jsonl --output runs/data/pairs --tokenizer runs/data/python_stdlib_4096.model"
    ' --prompt-key prompt --text-key completion | grep "give loss"',
    "python scripts/train_tokenizer.py my_code/ --output runs/data/code.model --vocab-size 32000 --fim": "mkdir my_code"
    f" && cp {os.path.dirname(os.__file__)}/a*.py my_code/ && python scripts/train_tokenizer.py my_code/"
    " --output runs/data/code.model --vocab-size 1000 --fim",
    "keel fork runs/base --at 300 --optimizer.lr 1e-4 --output runs/base-slow": "keel fork runs/debug --at 300"
    " --optimizer.lr 1e-4 --output runs/base-slow",
    "keel fork runs/base --at 300 --without web": "keel fork --help | grep -qe --without",
    "keel fork runs/base --at-tokens 2000000 --data.sources"
    ' \'[{name = "math", kind = "tokens", path = "data/math"}]\'': "keel fork runs/debug --at-tokens 20000000"
    ' --data.sources \'[{name = "math", kind = "synthetic"}]\'',
    "keel train runs/base-slow/config.toml": "keel train runs/base-slow/config.toml --ranks 2"
    " --training.steps 301 --validation.interval 0",
    "keel sample": "python scripts/keel.py sample --help",
    "keel replay": "python scripts/keel.py replay --help",
    "keel replay RUN --step N [N ...]": "python scripts/keel.py replay --help",
    "keel reproduce": "keel reproduce --help",
    "keel --help": "python scripts/keel.py --help",
    "keel runs": "python scripts/keel.py runs",
    "keel report runs/debug --output report.html": "python scripts/keel.py report runs/debug --output report.html",
    "keel report runs/debug": "python scripts/keel.py report runs/debug",
    "keel report runs --open": "python scripts/keel.py report runs",
    "keel report runs/debug --watch 10": "python scripts/keel.py report runs/debug --watch 10",
    # Of the comparisons the one of finished runs is run; tests/end_to_end/test_compare.py runs the others.
    "keel compare A.toml B.toml --seeds 3": "python scripts/keel.py compare --help",
    "keel compare debug.toml --sweep optimizer.lr=2e-3,3e-3,4e-3 --seeds 3": "cp -r runs/debug-2 runs/a && cp -r"
    " runs/debug-2 runs/b",
    "keel compare runs/a runs/b": "python scripts/keel.py compare runs/a runs/b",
    "keel coordinates": "keel coordinates --help",
    "keel prepare": "keel prepare --help",
    # tests/end_to_end/test_ladder.py climbs one.
    "keel ladder debug.toml": "keel ladder --help",
    "keel ladder debug.toml --run runs/debug": "keel ladder --help",
    "keel coordinates widths.toml --dims 64,128,256,512,1024 --lr_schedule.warmup_steps 0": "keel coordinates"
    " widths.toml --dims 64,128 --steps 1 --lr_schedule.warmup_steps 0 && ls runs/coordinates-widths.svg",
    "keel coordinates widths_32.toml --dims 32,64,128 --rates 4e-3,8e-3,16e-3,32e-3": "keel coordinates widths_32.toml"
    " --dims 32,64 --rates 4e-3,8e-3 --lr_schedule.warmup_steps 0 && ls runs/rates-widths.svg",
    "keel compare": "python scripts/keel.py compare --help",
    "keel plan": "python scripts/keel.py plan --help",
    "keel plan JOB --ranks N --device h100": "python scripts/keel.py plan llama_1b.toml --ranks 8 --device h100",
    "python -m tests.loader_speed debug.toml": "python -m tests.loader_speed debug.toml --data.prepare none"
    """ --data.sources '[{name = "random", kind = "synthetic"}]'""",
    "python -m tests.window_costs": "python -m tests.window_costs --tokens 1024 --windows 128",
    "python -m tests.published.compare": "python -m tests.published.compare --rows kempnerforge",
    "keel plan llama_8b.toml --ranks 8 --device h100 --tune": (
        "python scripts/keel.py plan llama_8b.toml --ranks 8 --device h100 --tune"
    ),
    "keel plan llama_405b.toml --ranks 512 --device h100 --html plan.html": (
        "python scripts/keel.py plan llama_1b.toml --ranks 8 --device h100 --html plan.html && ls plan.html"
    ),
    "keel plan llama_405b.toml --ranks 512 --prove": (
        "python scripts/keel.py plan debug.toml --ranks 2 --mesh.pp 2 --prove"
    ),
    "keel plan llama_8b.toml --ranks 8..64 --device h100 --tune --price 2.5": (
        "python scripts/keel.py plan debug.toml --training.compute_dtype bfloat16 --ranks 1..2 --device h100 --tune "
        "--price 2.5"
    ),
    "keel plan --config JOB --ranks 8 --memory-gib 80": "python scripts/keel.py plan --config llama_1b.toml --ranks 8"
    " --memory-gib 80",
    "python train.py": "python train.py --help",
    "python scripts/parity.py": "python scripts/parity.py --list",
    "python scripts/parity.py --exact --dtype float32": "python scripts/parity.py --exact --dtype float32"
    " --rows '1 process, none, eager, accumulation 1'",
    "keel score runs/chat --step 300 --training.seq_len 256 --data.document_mask false --validation.sources"
    """ '[{name = "chats", kind = "tokens", path = "runs/data/chats/validation"}]'""": "keel score runs/debug"
    """ --validation.sequences 8 --validation.sources '[{name = "noise", kind = "synthetic"}]'""",
    "keel score RUN": "python scripts/keel.py score runs/a",
    "keel train JOB --optimizer.lr 1e-3 --job.output_dir runs/search/7": "python scripts/keel.py train debug"
    " --optimizer.lr 1e-3 --validate",
    # Two steps a stage.
    "keel train debug.toml --model.dim 96 --distillation.teacher runs/debug --job.name student": "keel train debug.toml"
    f" --model.dim 96 --distillation.teacher runs/debug --job.name student --training.steps 2 {BATCH}",
    "keel train debug_stages.toml": f"keel train debug_stages.toml --training.steps 6 --checkpoint.interval 2 {BATCH}"
    " --stages.0.at_step 2 --stages.1.at_step 4 --stages.1.training.seq_len 64",
    "keel score runs/debug_stages --step 300 --training.seq_len 256 --data.document_mask false"
    """ --validation.sequences 32 --validation.sources '[{name = "licenses", kind = "text", path ="""
    """ "runs/data/python_texts/licenses_held_out.jsonl"}]'""": "keel score runs/debug_stages --step 4"
    " --training.seq_len 64 --data.document_mask false --validation.sequences 4"
    """ --validation.sources '[{name = "licenses", kind = "text", path ="""
    """ "runs/data/python_texts/licenses_held_out.jsonl"}]'""",
    "keel train": "python scripts/keel.py train --help",
    "keel train JOB --nodes 1:4 --ranks 8": "python scripts/keel.py train debug --nodes 1:4 --ranks 8",
    "keel train JOB --ranks N": "python scripts/keel.py train debug --ranks 2 --validate",
    "python scripts/benchmark.py": "python scripts/benchmark.py --rounds 1 --steps 1 --variants bare-eager,keel-eager",
    "python scripts/import_hf.py path/to/hf_model runs/imported": "python scripts/import_hf.py runs/debug-hf"
    " runs/imported",
    "python scripts/import_hf.py Llama-3.2-1B runs/import/llama_1b": "python scripts/import_hf.py runs/debug-hf"
    " runs/import/llama_1b",
    "python scripts/export_hf.py runs/llama_8b/checkpoints/step-00150000 llama-8b-hf --dtype bfloat16": "python"
    " scripts/export_hf.py runs/debug/checkpoints/step-00000300 llama-8b-hf --dtype bfloat16",
    # The recipes: a file of parquet, and a published model, that are made here; fewer ranks, steps and pieces.
    'hf download HuggingFaceFW/fineweb-edu --repo-type dataset --include "sample/10BT/*" --local-dir fineweb_edu': (
        "python -m tests.end_to_end.published fineweb_edu"
    ),
    "keel tokenizer fineweb_edu/for_the_tokenizer.parquet --output runs/data/fineweb_edu.model --vocab-size 32000": (
        "keel tokenizer fineweb_edu/for_the_tokenizer.parquet --output runs/data/fineweb_edu.model --vocab-size 1000"
    ),
    'keel prepare "fineweb_edu/sample/10BT/*.parquet" --output runs/data/fineweb_edu --tokenizer'
    " runs/data/fineweb_edu.model --validation-fraction 0.001": 'keel prepare "fineweb_edu/sample/10BT/*.parquet"'
    " --output runs/data/fineweb_edu --tokenizer runs/data/fineweb_edu.model --validation-fraction 0.1",
    "keel train fineweb_edu_1b.toml --ranks 8 --validate": "keel train fineweb_edu_1b.toml --ranks 8 --validate"
    " --model.vocab_size 1000",
    "keel plan fineweb_edu_1b.toml --ranks 8 --device h100 --price 2.5": "keel plan fineweb_edu_1b.toml --ranks 8"
    " --device h100 --price 2.5 > plan && grep '43.2 GiB' plan && grep '4 h 42 min' plan && grep '94 at 2.5' plan",
    "keel train fineweb_edu_1b.toml --ranks 8 --training.steps 30 --job.output_dir runs/first_try": "keel train"
    f" fineweb_edu_1b.toml --training.steps 1 --job.output_dir runs/first_try {TINY_1B}",
    "keel train fineweb_edu_1b.toml --ranks 8": "keel train fineweb_edu_1b.toml --ranks 2 --training.steps 2"
    f" {TINY_1B}",
    'keel sample runs/fineweb_edu_1b "The water cycle is" --max-tokens 64': "keel sample runs/fineweb_edu_1b"
    ' "The water cycle is" --max-tokens 4',
    "keel export runs/fineweb_edu_1b/checkpoints/step-00019000 fineweb-edu-1b-hf --dtype bfloat16": "keel export"
    " runs/fineweb_edu_1b/checkpoints/step-00000002 fineweb-edu-1b-hf --dtype bfloat16",
    "hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B": "python -m tests.end_to_end.published Llama-3.2-1B",
    "keel prepare my_text --output runs/data/my_text_llama_3 --tokenizer runs/import/llama_1b/tokenizer.json"
    " --validation-fraction 0.05": "keel prepare my_text --output runs/data/my_text_llama_3 --tokenizer"
    " runs/import/llama_1b/tokenizer.json --validation-fraction 0.2",
    "keel import Llama-3.2-1B runs/import/llama_1b": "rm -rf runs/import/llama_1b && keel import Llama-3.2-1B"
    " runs/import/llama_1b",
    "keel train continued.toml --ranks 8 --training.steps 1 --job.output_dir runs/first_step": "keel train"
    " continued.toml --ranks 2 --training.steps 1 --job.output_dir runs/first_step",
    "keel train continued.toml --ranks 8": "keel train continued.toml --ranks 2 --training.steps 4",
    "keel export runs/continued/checkpoints/step-00002000 continued-hf --dtype bfloat16": "keel export"
    " runs/continued/checkpoints/step-00000004 continued-hf --dtype bfloat16 && python -c 'import transformers;"
    ' transformers.AutoModelForCausalLM.from_pretrained("continued-hf")\'',
    "keel prove": "keel prove --help",
    "keel score": "keel score --help",
    "keel data": "keel data --help",
    "keel prove JOB": "keel prove --help",
    "keel checkpoint average runs/debug OUTPUT": "keel train debug.toml --training.steps 4 --checkpoint.interval 2"
    f" --average.interval 1 --job.output_dir runs/averaged {BATCH} && keel checkpoint average runs/averaged an_average",
    "keel checkpoint average runs/debug OUTPUT --last 3": "keel checkpoint average runs/averaged a_mean --last 2",
    "keel checkpoint metadata CHECKPOINT OUTPUT": "keel checkpoint metadata runs/debug torch_index",
    "keel checkpoint prune": "keel checkpoint prune --help",
    "keel prove '*' --axes 'ddp,fsdp,zero,tp,PP 2 1f1b,ac,documents,cp,ep,compile' --ranks 2 --page PAGE": (
        'keel prove "olmo[2]" --axes fsdp --ranks 2 --page families.md'
    ),
    "keel prove debug.toml": "keel prove debug.toml --axes fsdp --ranks 2",
    "keel prove my_model.toml": "keel prove my_model.toml --axes fsdp --ranks 2",
    "keel prove my_model:GPT2": "keel prove my_model:GPT2 --axes fsdp --ranks 2 --model.options.vocab_size 128"
    " --model.options.dim 32 --model.options.n_layers 2 --model.options.ffn_dim 64",
    "keel prove my_mixture.toml --ranks 2 --axes ep,tp": "keel prove my_mixture.toml --ranks 2 --axes ep",
    "keel train my_mixture.toml --ranks 2 --mesh.ep 2": "keel train my_mixture.toml --ranks 2 --mesh.ep 2"
    f" --training.steps 2 {BATCH}",
    "keel train my_model.toml --ranks 2 --mesh.tp 2": "keel train my_model.toml --ranks 2 --mesh.tp 2"
    f" --training.steps 2 {BATCH}",
    'keel sample runs/my_model "def main(" --model.architecture my_model:GPT2': "keel sample runs/my_model"
    ' "def main(" --max-tokens 3 --model.architecture my_model:GPT2',
    "keel import": "keel import --help",
    "keel import SOURCE OUTPUT --as-it-is": "keel import --help | grep -q as-it-is",
    "keel export": "keel export --help",
    # Options that a text names.
    "keel train --ranks": "keel train --help | grep -qe --ranks",
    "keel train --nodes": "keel train --help | grep -qe --nodes",
    "torchrun --standalone": "torchrun --help | grep -qe --standalone",
    "keel train JOB": "keel train debug.toml --validate",
    "keel data ledger runs/continued": "keel data ledger runs/continued | grep -q epoch",
    "torchrun --nproc-per-node 4 train.py --config llama_8b.toml --training.seq_len 131072 --mesh.cp 4": "torchrun"
    f" --nproc-per-node 4 train.py --config llama_8b.toml --training.seq_len 512 --mesh.cp 4 {TINY_8B}",
}
ENVIRONMENT_THERE = "the tests run in the environment that it would make"
TWO_COMMANDS = "tests/end_to_end/test_two_commands.py"
THIS = "that is what runs this test"
NOT_RUN = {  # beginning of a line: why not
    "sh scripts/start.sh": TWO_COMMANDS,
    "sh scripts/test.sh": TWO_COMMANDS,
    "python3 -m venv": ENVIRONMENT_THERE,
    "pip install": ENVIRONMENT_THERE,
    "pytest": THIS,
    "python -m pytest": THIS,
    "python -m tests.torture": "tests/torture/test_torture.py",
    "python -m tests.a_against_a": "tests/end_to_end/test_compare.py",
    "python scripts/examples/optuna_search.py": "tests/end_to_end/test_examples.py",
    "python -m tests.soak": "tests/torture/test_torture.py",
    "torchrun --signals-to-handle": "an option, not a command; tests/soak.py uses it",
    "python scripts/launch/rendezvous.py": "tests/torture/test_torture.py",
    "export KEEL_": "tests/torture/test_torture.py",
    "(umask 077": "tests/end_to_end/test_elastic_script.py",
    "scripts/launch/elastic.sh": "tests/torture/test_torture.py",
    "torchrun --max-restarts": "an option, not a command; tests/end_to_end/test_restarts.py uses it",
    "python -m tests.gpu": "needs a GPU; tests/gpu/test_first_half_hour.py",
    "python -m tests.null_gpu": "needs torch's CUDA build; tests/null_gpu",
    "OMP_NUM_THREADS=2 python -m tests.peers": "as the next",
    "python -m tests.peers": "needs other frameworks' environments; tests/unit/scripts/test_scripts.py",
    "python -m tests.real_weights": "needs a model in full size",
    "torchrun --nproc-per-node 2 train.py --config qwen3.toml": "tests/end_to_end/test_hf_runs.py",
    "keel export runs/qwen3": "tests/end_to_end/test_hf_runs.py",
    "keel sample qwen3-hf": "tests/end_to_end/test_hf_runs.py",
    "python -m tests.published.tuned": "half a minute of searches; tests/unit/planning/test_search.py",
    "torchx": "tests/launchers/published_forms.py",
    "keel export {checkpoint} s3://": "tests/bucket/test_run_in_bucket.py",
    "sbatch": "tests/slurm/test_launch_on_slurm.py",
    "SHARDS=$(sbatch": "tests/slurm/test_preparation_on_slurm.py",
    "python -m tests.bucket.speed": "minutes, and a server",
    "keel train debug.toml --job.output_dir s3:": "object storage: tests/bucket has it, with a server",
    "keel prepare s3:": "object storage: tests/bucket has it, with a server",
    "python -m tests.bucket.slow": "tests/bucket/test_data_in_bucket.py starts it",
    "keel sample s3:": "object storage: tests/bucket has it, with a server",
    "keel export s3:": "object storage: tests/bucket has it, with a server",
    "keel report s3:": "object storage: tests/bucket has it, with a server",
    "keel compare s3:": "object storage: tests/bucket has it, with a server",
    "keel fork s3:": "object storage: tests/bucket has it, with a server",
    "keel checkpoint prune s3:": "object storage: tests/bucket has it, with a server",
    "keel checkpoint average s3:": "object storage: tests/bucket has it, with a server",
    "keel import s3:": "object storage: tests/bucket has it, with a server",
    "python -m tests.bucket.kill": "tests/bucket/test_kill.py",
    "hf auth login": "asks for a token",
    "vllm": "not installed; the page says that no test runs it",
    "curl": "not installed; the page says that no test runs it",
    "keel plan debug.toml --ranks 1 --calibrate cpu.toml": "half a minute; tests/unit/scripts/test_calibration.py",
    "keel plan JOB --ranks N --calibrate my_gpu.toml": "needs a GPU; tests/null_gpu/test_calibration.py",
    "lm_eval": "not installed; the page says that no test runs it",
    "sh -c": "needs a host for backups; tests/end_to_end/test_after_save.py",
    "keel evaluate": "lm-eval may not be installed; tests/end_to_end/test_evaluation.py",
}
LONG = (  # beginning of a line that is run by `pytest -m long` alone
    "python scripts/parity.py --rows",
    "keel prove debug.toml --",
    "keel prove qwen3",
    "python scripts/benchmark.py",
    "python scripts/plan.py --config mixtral_8x7b.toml",
    "python -m tests.scale.saves",
    "python -m tests.scale.start",
    "python -m tests.window_costs",
    "python -m tests.loader_speed",
    "python scripts/parity.py --random",
    "python scripts/parity.py --exact",
)
NO_COMMANDS = {  # first line of an indented block that is neither a command nor TOML: what it is
    '{"Rules": [{"ID": "parts", "Status": "Enabled", "Filter": {}, "AbortIncompleteMultipartUpload": '
    '{"DaysAfterInitiation": 1}}]}': "a rule of S3's; the commands of its client are not installed",
    "OUTPUT/prepare.json             settings and counts; the inputs that were skipped": "a folder",
    'activation_checkpoint.memory_limit_gib = "device" chooses mode = "selective", layers = "0-8": about 71.8 GiB of'
    " 72.0 GiB": "what a launch prints",
    "BOS <fim_prefix> def area(w, h): <fim_suffix> return size <fim_middle> size = w * h EOS      prefix first"
    " (PSM)": "two documents",
    "def main(self):": "a sampled text",
    "(1 - weight) * cross-entropy(s, text) + weight * T^2 * KL(softmax(t / T) || softmax(s / T))": "a formula",
    "what ranks wait for": "what keel plan --prove prints",
    "plan   a step 1.3 s instead of 1.2 s (+9.2%), the largest difference": "the end of a closing table",
    "ranks wait for each other forever:": "what it prints of a hang",
    "debug.toml, made small, on up to 4 ranks, against one process in plain PyTorch": "what keel prove prints",
    "TP 2                                           0e+00   8e-05   7e-01   2e-01   2.6 WRONG": "the same",
    "equal: loss, norm and 4 gradients, to 3.9e-16": "what a report prints",
    "WRONG": "the same",
    "loss on 64 validation sequences, the same for all runs:": "what keel compare prints",
    "differs     from step 301 on: optimizer.lr: 0.003 -> 0.001": "the same",
    "weight * sum over experts i of f_i P_i": "a formula",
    "loss in the gradients = main loss + loss_weight / depth * sum over k of L_k": "a formula",
    "<|user|>What does glob.escape do?<|assistant|>Escape all.<|end|><|user|>Thanks<|assistant|>...": "a text",
    "stage  first step  after tokens  tokens  sequences  learning rate       epochs of its sources": "a plan",
    "the run's settings differ from those of checkpoint runs/base/checkpoints/step-00000300:": "an error",
}
PRINTED = (
    "error: ",
    "elastic: ",
    "resuming from ",
    "warning: ",
    "step ",
    '{"',
    "validation loss ",
)  # beginnings of indented blocks that show what Keel prints or writes
SYNTHETIC = """
[[data.sources]]
name = "noise"
kind = "synthetic"
"""
REST = f"""
[job]
name = "rest"
{SYNTHETIC}
[training]
steps = 1
seq_len = 16
global_batch_size = 1

[optimizer]
lr = 1e-3

[lr_schedule]
total_steps = 1
"""
MODEL = """
[model]
vocab_size = 1000
dim = 32
n_layers = 1
n_heads = 2
ffn_dim = 64
"""
JOBS = {  # a line of a TOML block: what precedes and follows it in its job file, what is run with the file
    'path = "runs/data/mine.model"': (
        "",
        f"{REST.replace(SYNTHETIC, '')}{MODEL}",
        "torchrun train.py --config {job} --job.name mine",
    ),
    'path = "s3://my-bucket/data/mine/tokenizer.model"': (
        "",
        f"{REST.replace(SYNTHETIC, '')}{MODEL}",
        "python train.py --config {job} --validate",
    ),
    'base = "../runs/import/llama_1b/model.toml"': ("", REST, "python train.py --config {job} --training.steps 1"),
    'architecture = "hf"': (
        "",
        "",
        "python -c 'import transformers as t; t.AutoModelForCausalLM.from_config(t.Gemma3TextConfig(vocab_size=4096,"
        " hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,"
        ' intermediate_size=128)).save_pretrained("gemma-3-270m")\' && torchrun train.py --config {job}'
        " --job.name gemma --training.steps 1",
    ),
    'architecture = "my_model:GPT2"': (
        "",
        "",
        "mv configs/{job} my_model.toml && python train.py --config my_model.toml --validate",
    ),
    'architecture = "my_mixture:MixtureGPT2"': (
        "",
        "",
        "mv configs/{job} my_mixture.toml && python train.py --config my_mixture.toml --validate",
    ),
    'name = "fineweb_edu_1b"': ("", "", "mv configs/{job} configs/fineweb_edu_1b.toml"),  # beside its base
    'name = "chat"': ("", "", "python train.py --config {job} --validate"),
    "mup_base_dim = 512": ("", "", "python train.py --config {job} --validate"),
    'base = "widths.toml"': ("", "", "sed 's/100/4/' configs/{job} > configs/widths_32.toml && rm configs/{job}"),
    'name = "widths"': ("", "", "sed 's/150/4/' configs/{job} > configs/widths.toml && rm configs/{job}"),
    'name = "continued"': (
        "",
        "",
        "sed -e 's/ = 4096/ = 64/; s/_size = 64/_size = 8/; s/interval = .*/interval = 2/;"
        " s/bfloat16/float32/' configs/{job} > continued.toml && rm configs/{job}",
    ),
    "n_shared_experts = 2": ('base = "moe_debug.toml"\n', "", "python train.py --config {job} --validate"),
}
ANY_JOB = ('base = "debug.toml"\n', "", "python train.py --config {job} --validate")
FIRST_LOSS = """
import json
first = json.loads(open("runs/first_step/metrics.jsonl").readline())["loss"]
assert abs(first - losses / targets) < 1e-5, (first, losses / targets)
"""
# A gloo group that is left to the exit of the interpreter aborts now and then: "terminate called without an exception".
END_OF_GLOO = "torch.distributed.destroy_process_group()\n"
PROGRAMS = {  # first line of a Python block: what precedes and follows it, what is run with the file
    'state = torch.load("runs/debug-optimizer/adamw.pt", weights_only=True, mmap=True)': (
        "import torch\nfrom configs.load import load\nfrom models import build_model\n"
        'model = build_model(load("debug.toml", (), 1).config.model)\n',
        "assert len(optimizer.state) == len(list(model.parameters()))\n"
        "assert all(state['step'] >= 300 for state in optimizer.state.values())\n"
        "for p in model.parameters():\n    p.grad = torch.ones_like(p)\n"
        "optimizer.step()\n",
        "PYTHONPATH=. python {program}",
    ),
    "class Losses:": (
        "",
        "from pathlib import Path\nfrom types import SimpleNamespace\n"
        "sink = Losses(SimpleNamespace(folder=Path('.')))\nsink.write({'step': 3, 'loss': 1.5})\n"
        "sink.write({'step': 3, 'evaluation': {}})\nsink.close()\n"
        "assert Path('losses.txt').read_text() == '3 1.5\\n'\n",
        "PYTHONPATH=. python {program}",
    ),
    "import pyarrow.parquet as parquet": ("", "", "python {program}"),
    "import ast": ("", "", "python {program} && test $(wc -l < chats.jsonl) -gt 1000"),
    '"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU."""': ("", "", "mv {program} my_model.py"),
    '"""GPT-2 with a mixture of experts in each block (Shazeer et al. 2017)."""': (
        "",
        "",
        "mv {program} my_mixture.py",
    ),
    '"""SGD with momentum (Sutskever et al. 2013)."""': (
        "",
        "",
        "mv {program} my_rule.py && python train.py --config debug.toml --optimizer.name my_rule:Momentum --validate",
    ),
    "def parabola(progress):": (
        "",
        "",
        "mv {program} my_schedule.py"
        " && python train.py --config debug.toml --lr_schedule.name my_schedule:parabola --validate",
    ),
    "def with_z_loss(logits, targets):": (
        "",
        "",
        "mv {program} my_loss.py && python train.py --config debug.toml --training.loss my_loss:with_z_loss --validate",
    ),
    "import numpy as np": (
        "",
        "",
        "mv {program} my_source.py"
        " && python train.py --config parity.toml --data.sources.0.kind my_source:Counting --training.steps 1",
    ),
    "from keel import prove": ("", "", "torchrun --nproc-per-node 2 {program} | grep -q 'equal: loss, norm and 4'"),
    "# The published model's loss on the sequences of step 1.": ("", FIRST_LOSS, "PYTHONPATH=. python {program}"),
    "from torch.optim import SGD": (
        "import torch\ntorch.distributed.init_process_group('gloo')\ntorch.manual_seed(0)\n"
        "model = torch.nn.Linear(3, 3)\nmodel(torch.ones(1, 3)).sum().backward()\n",
        "theirs = SGD(model.parameters(), lr=1.0)\n"
        "assert torch.distributed.get_rank() or theirs.load_state_dict(state) is None\n" + END_OF_GLOO,
        "PYTHONPATH=. torchrun --nproc-per-node 2 {program}",
    ),
    "import torch": ("", "assert streams == 2\n" + END_OF_GLOO, "PYTHONPATH=. torchrun --nproc-per-node 4 {program}"),
}
FLAGS = ("--help", "--validate", "--print-config", "--list", "--trace", "--optimizer")  # options that take no value
COMMANDS = (
    "sh",
    "hf",
    "sbatch",
    "python",
    "python3",
    "torchrun",
    "keel",
    "pytest",
    "pip",
    "tensorboard",
    "vllm",
    "curl",
    "lm_eval",
)


@dataclass(frozen=True)
class Block:
    """Something in a page that a reader would run or copy."""

    place: str
    """ "README.md:12"."""
    kind: str
    """sh, toml, python; of indented blocks "", if they are neither commands nor TOML."""
    text: str

    def commands(self) -> list[str]:
        """The lines of a `sh` block, without comments, those that go on in the next line joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in (re.sub(r"\s+#.*$|\s+$", "", re.sub(r" +", " ", line)) for line in lines) if line]


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, and the commands in its text, from top to bottom."""
    lines, number = page.read_text().splitlines(), 0
    while number < len(lines):
        place, line = f"{page.relative_to(ROOT)}:{number + 1}", lines[number]
        if line.startswith("```"):
            end = lines.index("```", number + 1)
            yield Block(place, line.removeprefix("```"), "\n".join(lines[number + 1 : end]))
            number = end
        elif line.startswith("    ") and not lines[number - 1]:
            end = next(
                (n for n in range(number, len(lines)) if lines[n] and not lines[n].startswith("    ")), len(lines)
            )
            text = "\n".join(each.removeprefix("    ") for each in lines[number:end]).rstrip()
            yield Block(place, kind_of(text), text)
            number = end - 1
        else:
            for code in re.findall(r"`([^`]+)`", line):
                if code.split()[0] in COMMANDS and len(code.split()) > 1:
                    yield Block(place, "sh", code)
        number += 1


def kind_of(indented: str) -> str:
    """The kind of a block that does not say it."""
    first = indented.splitlines()[0]
    if first.split()[0] in COMMANDS:
        return "sh"
    return "toml" if re.match(r"\[|\w+ = ", first) else ""


def all_blocks() -> list[Block]:
    """Of README and docs."""
    return [block for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) for block in blocks(page)]


# --------------------------------------------------------------------------- what the text says of it


def check_debug(clone: Path, _: str) -> None:
    """The section "What the first command does"."""
    run = clone / "runs" / "debug"
    names = {path.name for path in run.iterdir()}
    assert names >= {"config.toml", "metrics.jsonl", "tensorboard", "checkpoints", "status.json", "run.log"}
    assert (run / "checkpoints" / "step-00000300").is_dir()
    points = curve(run)
    assert [step for step, *_ in points] == [1, *range(10, 301, 10)]
    assert abs(points[0][1] - 8.3) < 0.1
    assert points[-1][1] < 6.5  # about 4 with the whole batch
    assert (status(run)["state"], status(run)["step"]) == ("done", 300)


def check_two_ranks(clone: Path, told: str) -> None:
    """Resumed at 300; and from the start, past the guarded step that follows an asynchronous save."""
    assert "resuming from runs/debug/checkpoints/step-00000300" in told
    for name, steps, saves in (("debug", 304, (300, 304)), ("debug-2", 104, (100, 104))):
        run = clone / "runs" / name
        assert (status(run)["state"], status(run)["step"]) == ("done", steps)
        assert all((run / "checkpoints" / f"step-{save:08d}").is_dir() for save in saves)
        assert records(run)[-1]["loss"] < 7.5
    assert 'mode = "async"' in (clone / "runs" / "debug-2" / "config.toml").read_text()
    assert "order_guard_interval = 100" in (clone / "runs" / "debug-2" / "config.toml").read_text()


def check_four_ranks(clone: Path, told: str) -> None:
    """FSDP 2 x TP 2, from step 300 on."""
    assert "resuming from runs/debug/checkpoints/step-00000300" in told
    assert re.search(r"dp_shard 2.*tp 2|FSDP 2.*TP 2", told), told
    assert (status(clone / "runs" / "debug")["state"], status(clone / "runs" / "debug")["step"]) == ("done", 304)


def check_replay(clone: Path, told: str) -> None:
    """On the run's own mesh, and on another."""
    assert "equal within the bound: step" in told if "mesh.tp 1 -> 2" in told else "equal in bits: step" in told


CHECKS: dict[str, Callable[[Path, str], None]] = {
    "torchrun train.py --config debug.toml": check_debug,
    "torchrun --nproc-per-node 2 train.py --config debug.toml": check_two_ranks,
    "torchrun --nproc-per-node 4 train.py --config debug.toml": check_four_ranks,
    "python scripts/replay.py": check_replay,
}


# --------------------------------------------------------------------------- the tests


def make_clone(folder: Path) -> Path:
    """What a clone of this checkout would hold."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def write_programs(clone: Path, socket: str = "") -> Path:
    """Write the programs that lines call: Keel of this checkout, which need not be installed; with the `socket` of a
    server, also torchrun and Python, for whose Keel torch is imported already. Returns their folder."""
    folder = clone / ".keel"
    folder.mkdir(exist_ok=True)
    programs = {"keel": f'exec {sys.executable} "{clone}/scripts/keel.py" "$@"'}
    if socket:
        ask = f"{SOCKET}={socket} exec {sys.executable} -S -E {clone}/tests/preloaded_rank.py"
        programs = {
            "keel": f'{ask} python {clone}/scripts/keel.py "$@"',
            "torchrun": f'{ask} torchrun "$@"',
            "python": f'case $1 in train.py | scripts/*.py) {ask} python "$@" ;; esac\nexec {sys.executable} "$@"',
        }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def run(command: str, clone: Path, place: str) -> str:
    """Run a line to its end; returns what it has printed."""
    programs = clone / ".keel"
    if not programs.exists():
        write_programs(clone)
    path = f"{programs}:{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"
    process = subprocess.run(
        ["bash", "-ec", command],
        cwd=clone,
        env=ENVIRONMENT | {"PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert process.returncode == 0, f"{place}: `{command}` exits with {process.returncode}:\n{process.stdout[-5000:]}"
    return process.stdout


def try_line(line: str, clone: Path, place: str, done: set[str]) -> None:
    """Run a documented line, or what stands for it, and check what the text says of it.

    One that only shows something is run once: `done` has those that were.
    """
    command = INSTEAD.get(line, line)
    if not line.startswith(tuple(NOT_RUN)) and command not in done:
        if re.search(r" (--help|--list|--validate|--prove|--tune|--trace|sample|report|plan|prove)\b", command):
            done.add(command)
        told = run(command, clone, place)
        for beginning, check in CHECKS.items():
            if line.startswith(beginning):
                check(clone, told)


def try_file(block: Block, clone: Path, number: int) -> None:
    """Use a TOML or Python block as the text says."""
    if block.kind == "toml":
        keys = [key for key in JOBS if any(line.startswith(key) for line in block.text.splitlines())]
        before, after, command = JOBS[keys[0]] if keys else ANY_JOB
        file = clone / "configs" / f"block_{number}.toml"
    else:
        before, after, command = PROGRAMS[block.text.splitlines()[0]]
        file = clone / f"block_{number}.py"
    file.write_text(f"{before}{block.text}\n{after}")
    run(command.format(job=file.name, program=file.name), clone, block.place)


ALONE = ("exactness.md", "families.md", "optimizers.md", "own_models.md", "performance.md", "recipes.md")
"""Pages whose commands need nothing that those of other pages have made."""


@pytest.mark.slow
@pytest.mark.begins
def test_everything_that_is_documented_works(tmp_path: Path):
    try_all(tmp_path, lambda block: not is_alone(block))


@pytest.mark.slow
@pytest.mark.begins
def test_pages_that_stand_alone(tmp_path: Path):
    try_all(tmp_path, is_alone)


def is_alone(block: Block) -> bool:
    return block.place.removeprefix("docs/").startswith(ALONE)


def try_all(folder: Path, wanted: Callable[[Block], bool]) -> None:
    """Try these blocks, in order, in a clone of their own; all that fails is said at the end."""
    clone = make_clone(folder / "clone")
    with Server(folder / "tmp", root=clone) as server:
        write_programs(clone, server.address)
        faults = faults_of(clone, wanted)
    assert not faults, "\n\n".join(faults)


def faults_of(clone: Path, wanted: Callable[[Block], bool]) -> list[str]:
    """What failed of these blocks."""
    faults: list[str] = []
    done: set[str] = set()
    for number, block in enumerate(filter(wanted, all_blocks())):
        lines = [line for line in block.commands() if not line.startswith(LONG)] if block.kind == "sh" else []
        uses = [partial(try_line, line, clone, block.place, done) for line in lines]
        if block.kind in ("toml", "python"):
            uses.append(partial(try_file, block, clone, number))
        for use in uses:
            try:
                use()
            except (AssertionError, subprocess.TimeoutExpired) as fault:
                faults.append(str(fault))
    return faults


LONG_LINES = sorted(
    {
        line: block.place
        for block in all_blocks()
        if block.kind == "sh"
        for line in block.commands()
        if line.startswith(LONG)
    }.items()
)


@pytest.mark.long
@pytest.mark.parametrize(("line", "place"), LONG_LINES)
def test_what_takes_longer(tmp_path: Path, line: str, place: str):
    try_line(line, make_clone(tmp_path), place, set())


@pytest.mark.long
def test_the_first_command_uncut(tmp_path: Path):
    clone = make_clone(tmp_path)
    run("torchrun train.py --config debug.toml", clone, "README.md")
    check_debug(clone, "")
    assert 3.5 < records(clone / "runs" / "debug")[-1]["loss"] < 4.5


def test_every_block_can_be_run_or_is_listed():
    """In the quick suite, since the tests that run them are slow."""
    for block in all_blocks():
        first = block.text.splitlines()[0]
        if block.kind == "python":
            assert first in PROGRAMS, f"{block.place}: this program is not in PROGRAMS"
        elif block.kind == "sh":
            for line in block.commands():
                last = line.split()[-1]
                is_mention = (last.startswith("--") and last not in FLAGS) or line.endswith("...")
                is_mention |= bool(re.search(r" (JOB|CHECKPOINT|SOURCE)\b", line))
                is_known = line in INSTEAD or line.startswith(tuple(NOT_RUN))
                assert is_known or not is_mention, f"{block.place}: `{line}` does not run as it is: put it into INSTEAD"
        elif block.kind != "toml":
            assert block.text.startswith(PRINTED) or first in NO_COMMANDS, f"{block.place}: neither run nor listed"


def test_nothing_in_the_tables_is_out_of_date():
    lines = {line for block in all_blocks() if block.kind == "sh" for line in block.commands()}
    texts = [block.text.splitlines() for block in all_blocks()]
    assert not INSTEAD.keys() - lines
    for beginning in (*NOT_RUN, *LONG):
        assert any(line.startswith(beginning) for line in lines), beginning
    assert NO_COMMANDS.keys() | PROGRAMS.keys() <= {text[0] for text in texts}
    for key in JOBS:
        assert any(line.startswith(key) for text in texts for line in text), key
