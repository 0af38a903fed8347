"""Shapes of public models, for rows whose cells are empty. Each with where it was read."""

from shoal.plan.shapes import Experts, Latent, Mamba, Shape

#: One letter per layer; of the second the public configuration names the first 60.
NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
#: Part of a name (lower case, letters, digits and dots) -> shape. The longest that a row's model contains is taken.
MODELS = {
    # https://huggingface.co/internlm/internlm-7b/blob/main/config.json (vocabulary 103168)
    "internlm7b": Shape("InternLM-7B", 32, 4096, 32, 32, 11008, 103168),
    # https://huggingface.co/internlm/internlm-20b/blob/main/config.json
    "internlm20b": Shape("InternLM-20B", 60, 5120, 40, 40, 13824, 103168),
    # https://huggingface.co/meta-llama/Llama-2-7b-hf and the like
    "llama27b": Shape("Llama-2-7B", 32, 4096, 32, 32, 11008, 32000),
    "llama213b": Shape("Llama-2-13B", 40, 5120, 40, 40, 13824, 32000),
    "llama270b": Shape("Llama-2-70B", 80, 8192, 64, 8, 28672, 32000),
    # https://huggingface.co/meta-llama/Llama-3.1-8B and the like
    "llama38b": Shape("Llama-3-8B", 32, 4096, 32, 8, 14336, 128256),
    "llama3.18b": Shape("Llama-3.1-8B", 32, 4096, 32, 8, 14336, 128256),
    "llama370b": Shape("Llama-3-70B", 80, 8192, 64, 8, 28672, 128256),
    "llama3.170b": Shape("Llama-3.1-70B", 80, 8192, 64, 8, 28672, 128256),
    "llama3.1405b": Shape("Llama-3.1-405B", 126, 16384, 128, 8, 53248, 128256),
    "llama3405b": Shape("Llama-3.1-405B", 126, 16384, 128, 8, 53248, 128256),
    "llama3.21b": Shape("Llama-3.2-1B", 16, 2048, 32, 8, 8192, 128256, tied=True),
    "llama3.23b": Shape("Llama-3.2-3B", 28, 3072, 24, 8, 8192, 128256, head_dim=128, tied=True),
    # fms-fsdp's 1.8B configuration, https://github.com/foundation-model-stack/fms-fsdp config_utils.py (llama3_1.8b)
    "llama31.8b": Shape("Llama-3-1.8B", 24, 2048, 16, 8, 7168, 128256),
    # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1, Mixtral-8x22B-v0.1
    "mixtral8x7b": Shape("Mixtral-8x7B", 32, 4096, 32, 8, 14336, 32000, experts=Experts(8, 2, 14336)),
    "mixtral8x22b": Shape("Mixtral-8x22B", 56, 6144, 48, 8, 16384, 32768, experts=Experts(8, 2, 16384)),
    "mistral7b": Shape("Mistral-7B", 32, 4096, 32, 8, 14336, 32000),
    # https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json
    "deepseekv3": Shape("DeepSeek-V3", 61, 7168, 128, 128, 18432, 129280, head_dim=128,
                        experts=Experts(256, 8, 2048, 2048, 3, 18432), latent=Latent(1536, 512, 64, 128)),
    # https://huggingface.co/deepseek-ai/DeepSeek-V2/blob/main/config.json, and V2-Lite
    "deepseekv2": Shape("DeepSeek-V2", 60, 5120, 128, 128, 12288, 102400, head_dim=128,
                        experts=Experts(160, 6, 1536, 3072, 1, 12288), latent=Latent(1536, 512, 64, 128)),
    "deepseekv2lite": Shape("DeepSeek-V2-Lite", 27, 2048, 16, 16, 10944, 102400, head_dim=128,
                            experts=Experts(64, 6, 1408, 2816, 1, 10944), latent=Latent(0, 512, 64, 128)),
    # https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/config.json
    "kimik2": Shape("Kimi-K2", 61, 7168, 64, 64, 18432, 163840, head_dim=128,
                    experts=Experts(384, 8, 2048, 2048, 1, 18432), latent=Latent(1536, 512, 64, 128)),
    # https://huggingface.co/Qwen/Qwen3-30B-A3B, Qwen3-235B-A22B
    "qwen330b": Shape("Qwen3-30B-A3B", 48, 2048, 32, 4, 6144, 151936, head_dim=128, experts=Experts(128, 8, 768)),
    "qwen3235b": Shape("Qwen3-235B-A22B", 94, 4096, 64, 4, 12288, 151936, head_dim=128,
                           experts=Experts(128, 8, 1536)),
    # https://huggingface.co/openai/gpt-oss-120b/blob/main/config.json
    "gptoss120b": Shape("gpt-oss-120b", 36, 2880, 64, 8, 2880, 201088, head_dim=64, window=128,
                        experts=Experts(128, 4, 2880)),
    "gptoss20b": Shape("gpt-oss-20b", 24, 2880, 64, 8, 2880, 201088, head_dim=64, window=128,
                       experts=Experts(32, 4, 2880)),
    # https://arxiv.org/abs/2005.14165, table 2.1
    "gpt3175b": Shape("GPT-3 175B", 96, 12288, 96, 96, 49152, 51200, gated=False, learned=2048),
    # https://github.com/NVIDIA/Megatron-LM tests/functional_tests/test_cases/nemotron (widths, experts, pattern);
    # Mamba-2 as in https://huggingface.co/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16/blob/main/config.json
    "nemotron3nano": Shape("Nemotron-3-Nano", 52, 2688, 32, 2, 1856, 131072, head_dim=128, gated=False, pattern=NANO,
                           experts=Experts(128, 6, 1856, 3712), mamba=Mamba(4096, 128, 8, 64)),
    "nemotron3.5lightning": Shape("Nemotron-3.5-Lightning", 52, 2688, 32, 2, 1856, 131072, head_dim=128, gated=False,
                                  pattern=NANO, experts=Experts(128, 6, 1856, 3712), mamba=Mamba(4096, 128, 8, 64)),
    "nemotron3super": Shape("Nemotron-3-Super", 88, 4096, 32, 2, 2688, 131072, head_dim=128, gated=False, pattern=SUPER,
                            experts=Experts(512, 22, 2688, 5376, width=1024), mamba=Mamba(8192, 128, 8, 128)),
    # https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/config.json and its other sizes; Qwen2 has the same
    "qwen2.50.5b": Shape("Qwen2.5-0.5B", 24, 896, 14, 2, 4864, 151936, tied=True),
    "qwen2.51.5b": Shape("Qwen2.5-1.5B", 28, 1536, 12, 2, 8960, 151936, tied=True),
    "qwen2.53b": Shape("Qwen2.5-3B", 36, 2048, 16, 2, 11008, 151936, tied=True),
    "qwen2.57b": Shape("Qwen2.5-7B", 28, 3584, 28, 4, 18944, 152064),
    "qwen27b": Shape("Qwen2-7B", 28, 3584, 28, 4, 18944, 152064),
    "qwen2.514b": Shape("Qwen2.5-14B", 48, 5120, 40, 8, 13824, 152064),
    "qwen2.532b": Shape("Qwen2.5-32B", 64, 5120, 40, 8, 27648, 152064),
    "qwen2.572b": Shape("Qwen2.5-72B", 80, 8192, 64, 8, 29568, 152064),
    "qwen272b": Shape("Qwen2-72B", 80, 8192, 64, 8, 29568, 152064),
    # https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json and its other sizes
    "qwen38b": Shape("Qwen3-8B", 36, 4096, 32, 8, 12288, 151936, head_dim=128),
    "qwen314b": Shape("Qwen3-14B", 40, 5120, 40, 8, 17408, 151936, head_dim=128),
    "qwen332b": Shape("Qwen3-32B", 64, 5120, 64, 8, 25600, 151936, head_dim=128),
    "qwen3moe30b": Shape("Qwen3-30B-A3B", 48, 2048, 32, 4, 6144, 151936, head_dim=128, experts=Experts(128, 8, 768)),
    # https://github.com/xai-org/grok-1/blob/main/run.py
    "grok1": Shape("Grok-1", 64, 6144, 48, 8, 32768, 131072, head_dim=128, experts=Experts(8, 2, 32768)),
    # https://arxiv.org/abs/2302.13971, table 2
    "llama7b": Shape("LLaMA-7B", 32, 4096, 32, 32, 11008, 32000),
    "llama13b": Shape("LLaMA-13B", 40, 5120, 40, 40, 13824, 32000),
    "llama30b": Shape("LLaMA-33B", 60, 6656, 52, 52, 17920, 32000),
    "llama33b": Shape("LLaMA-33B", 60, 6656, 52, 52, 17920, 32000),
    "llama65b": Shape("LLaMA-65B", 80, 8192, 64, 64, 22016, 32000),
    # https://huggingface.co/TinyLlama/TinyLlama-1.1B-Chat-v1.0/blob/main/config.json
    "tinyllama": Shape("TinyLlama-1.1B", 22, 2048, 32, 4, 5632, 32000),
    # https://huggingface.co/bigscience/bloom/blob/main/config.json
    "bloom176b": Shape("BLOOM-176B", 70, 14336, 112, 112, 57344, 250880, gated=False, tied=True),
    # https://arxiv.org/abs/2205.01068, table 1
    "opt175b": Shape("OPT-175B", 96, 12288, 96, 96, 49152, 50272, gated=False, tied=True, learned=2048),
    # https://huggingface.co/EleutherAI/gpt-neox-20b/blob/main/config.json
    "gptneox20b": Shape("GPT-NeoX-20B", 44, 6144, 64, 64, 24576, 50432, gated=False),
    # https://huggingface.co/tiiuae/falcon-40b/blob/main/config.json and its other sizes
    "falcon7b": Shape("Falcon-7B", 32, 4544, 71, 1, 18176, 65024, gated=False, tied=True),
    "falcon40b": Shape("Falcon-40B", 60, 8192, 128, 8, 32768, 65024, gated=False),
    "falcon180b": Shape("Falcon-180B", 80, 14848, 232, 8, 59392, 65024, gated=False),
    # https://arxiv.org/abs/2201.11990
    "mtnlg530b": Shape("MT-NLG 530B", 105, 20480, 128, 128, 81920, 51200, gated=False, tied=True, learned=2048),
    # https://arxiv.org/abs/2406.11704 and https://arxiv.org/abs/2402.16819, table 1: two products with squared ReLU
    "nemotron4340b": Shape("Nemotron-4-340B", 96, 18432, 96, 8, 73728, 256000, gated=False),
    "nemotron340b": Shape("Nemotron-4-340B", 96, 18432, 96, 8, 73728, 256000, gated=False),
    "nemotron415b": Shape("Nemotron-4-15B", 32, 6144, 48, 8, 24576, 256000, gated=False),
    # https://huggingface.co/openai-community/gpt2/blob/main/config.json and its larger sizes
    "gpt2124m": Shape("GPT-2 124M", 12, 768, 12, 12, 3072, 50257, gated=False, tied=True, learned=1024),
    "gpt2medium": Shape("GPT-2 Medium", 24, 1024, 16, 16, 4096, 50257, gated=False, tied=True, learned=1024),
    "gpt2large": Shape("GPT-2 Large", 36, 1280, 20, 20, 5120, 50257, gated=False, tied=True, learned=1024),
    "gpt2xl": Shape("GPT-2 XL", 48, 1600, 25, 25, 6400, 50257, gated=False, tied=True, learned=1024),
}  # fmt: skip
