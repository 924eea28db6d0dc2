"""Which model families cannot attend through the block table, by Transformers release."""

from __future__ import annotations

_ATTENDS_ON_ITS_OWN = (
    "autoformer bark big_bird bigbird_pegasus blip blip_text_model bloom clvp clvp_decoder codegen cpmant ctrl falcon "
    "flaubert fsmt git gpt_neo gpt_neox_japanese gptj imagegpt informer kyutai_speech_to_text led megatron-bert mimi "
    "moshi mpt mvp prophetnet recurrent_gemma reformer rembert roformer seamless_m4t seamless_m4t_v2 speecht5 tapas "
    "trocr unlimited_ocr xglm xlm"
)
_COMPUTES_WITH_THE_HISTORY = (
    "axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots3_note "
    "glm4_moe_lite glm5_next glm_moe_dsa hy_v4 hy_v4_vl idefics inkling jetmoe kimi_linear longcat_flash longt5 "
    "minicpm3 minimax_m3_vl mistral4 moonshine moonshine_streaming mt5 pix2struct pix2struct_text_model pop2piano "
    "switch_transformers t5 t5gemma2 udop umt5 youtu"
)
_BEFORE_5_17 = "nemotron"
_BEFORE_5 = (
    "bert bert-generation bridgetower camembert data2vec-text dbrx electra ernie jamba olmoe phimoe qwen2_moe roberta "
    "roberta-prelayernorm roc_bert stablelm xlm-roberta xlm-roberta-xl xmod"
)


def gathered(version: tuple[int, ...]) -> frozenset[str]:
    """Model types whose attention does not go from ``update`` straight to a looked-up attention function.

    Args:
        version: of Transformers, its first numbers.
    """
    names = f"{_ATTENDS_ON_ITS_OWN} {_COMPUTES_WITH_THE_HISTORY}"
    if version < (5, 17):
        names += f" {_BEFORE_5_17}"
    if version < (5,):
        names += f" {_BEFORE_5}"
    return frozenset(names.split())
