"""What the recipes fetch from the hub, in small: `python -m tests.end_to_end.published fineweb_edu` or `Llama-3.2-1B`.

Both are made of the source of Python's standard library, which also becomes `my_text/`.
"""

import shutil
import sys
import sysconfig
from pathlib import Path

import pyarrow as arrow
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = Path("my_text")
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


def fineweb_edu(folder: Path) -> None:
    """A file of parquet, with a column beside the text."""
    texts = [file.read_text() for file in sorted(TEXT.iterdir())]
    part = folder / "sample" / "10BT" / "000_00000.parquet"
    part.parent.mkdir(parents=True)
    parquet.write_table(arrow.table({"text": texts, "id": range(len(texts))}), part)


def llama(folder: Path) -> None:
    """A tied Llama 3 with random weights, as transformers saves it, and a tokenizer of bytes and pairs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(
        [str(file) for file in sorted(TEXT.iterdir())[:20]],
        trainers.BpeTrainer(vocab_size=600, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS).save_pretrained(folder)
    torch.manual_seed(0)
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    shape = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)


if __name__ == "__main__":
    TEXT.mkdir(exist_ok=True)
    for file in Path(sysconfig.get_path("stdlib")).glob("[a-m]*.py"):
        shutil.copy(file, TEXT)
    wanted = Path(sys.argv[1])
    (fineweb_edu if wanted.name == "fineweb_edu" else llama)(wanted)
