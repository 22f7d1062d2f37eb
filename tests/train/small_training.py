"""A tiny model of random weights in a folder."""

from transformers import LlamaConfig, LlamaForCausalLM, set_seed


def saved_model(folder, vocabulary, longest=512, change=None):
    """A folder with a Llama of some thousand random weights, after `change(model)`."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=longest, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if change is not None:
        change(model)
    model.save_pretrained(folder)
    return str(folder)
