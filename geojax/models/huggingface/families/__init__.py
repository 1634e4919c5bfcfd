"""The families of Hugging Face models that geojax reads and writes, one file each."""

from geojax.models.huggingface.families.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from geojax.models.huggingface.families.gemma import GEMMA2, GEMMA3, GEMMA3_TEXT
from geojax.models.huggingface.families.gpt2 import GPT2
from geojax.models.huggingface.families.gpt_oss import GPT_OSS
from geojax.models.huggingface.families.llama import LLAMA
from geojax.models.huggingface.families.mistral import MINISTRAL, MISTRAL
from geojax.models.huggingface.families.mixtral import MIXTRAL
from geojax.models.huggingface.families.nemotron import NEMOTRON
from geojax.models.huggingface.families.qwen2 import QWEN2
from geojax.models.huggingface.families.qwen3 import QWEN3, QWEN3_MOE
from geojax.models.huggingface.family import Family

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    QWEN2,
    QWEN3,
    MISTRAL,
    MINISTRAL,
    MIXTRAL,
    QWEN3_MOE,
    DEEPSEEK_V3,
    KIMI_K2,
    GEMMA2,
    GEMMA3_TEXT,
    GEMMA3,
    GPT_OSS,
    NEMOTRON,
    GPT2,
)
"""All families; a model is written as the first one that can express it."""
