import json
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3_5TextConfig, Qwen3_5TextModel

from engine.errors import CheckpointError, EngineError, RequestError
from engine.prompt import MAX_TOKENS, TextEncoder, check_template, count_tokens, crop, dead_prefixes, tokenize, trim

CROPS = json.loads((Path(__file__).parents[1] / "data" / "prompt_crop.json").read_text())
SYSTEM = "You are a helpful assistant. Generate the video with the following instructions."
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
ENDING = ["<|im_end|>", "\n", "<|im_start|>", "assistant", "\n", "<think>", "\n"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The models here are so small that a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def chat_tokenizer(template=CHATML):
    """Words, marks and line ends, in the chat format of Qwen3.5; unknown words are one token."""
    special = ["<unk>", "<s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    words = [
        "\n",
        " ",
        ".",
        "system",
        "user",
        "assistant",
        "a",
        "red",
        "ball",
        "rolls",
        *SYSTEM.replace(".", "").split(),
    ]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(special + words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|[^\w]"), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", additional_special_tokens=special[2:])
    fast.chat_template = template
    return fast


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


def text_model(layers=8, dtype=torch.float32):
    """A small model in the released pattern, three layers of linear attention to one of full attention, all random."""
    config = Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    model = Qwen3_5TextModel(config).eval()
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.to(dtype)


@pytest.mark.parametrize("case", CROPS[:-1])
def test_crop_agrees_with_the_golden_cases(case):
    tokens = crop(case["input_ids"], case["header_ids"], case["max_length"])
    assert tokens.start == case["crop_start"]
    assert len(tokens.ids) == case["encoder_input_length"]
    assert tokens.used == case["conditioning_length"]
    assert tokens.ids == case["input_ids"][: len(tokens.ids)]
    assert tokens.total == len(case["input_ids"]) - case["crop_start"]


def test_a_missing_header_is_refused():
    case = CROPS[-1]
    assert case["crop_start"] is None
    for ids, header in ((case["input_ids"], case["header_ids"]), ([], [1]), ([1, 2], [])):
        with pytest.raises(CheckpointError, match="chat template"):
            crop(ids, header, 1536)


def test_the_model_sees_system_message_prompt_and_generation_header(tokenizer):
    tokens = tokenize(tokenizer, "a red ball")
    seen = tokenizer.convert_ids_to_tokens(tokens.ids)
    assert "".join(seen).startswith(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
    assert seen[tokens.start :] == ["a", " ", "red", " ", "ball", *ENDING]
    assert (tokens.used, tokens.cut) == (12, 0)


def test_only_the_first_user_header_counts(tokenizer):
    tokens = tokenize(tokenizer, "a <|im_start|>user\nred")
    assert tokenizer.convert_ids_to_tokens(tokens.ids)[tokens.start :][:5] == ["a", " ", "<|im_start|>", "user", "\n"]


@pytest.mark.parametrize("empty", ["", None, " "])
def test_an_empty_prompt_is_one_space(empty):
    kept = chat_tokenizer(CHATML.replace(" | trim", ""))
    tokens = tokenize(kept, empty)
    assert kept.convert_ids_to_tokens(tokens.ids)[tokens.start :] == [" ", *ENDING]
    trimming = chat_tokenizer()
    tokens = tokenize(trimming, empty)
    assert trimming.convert_ids_to_tokens(tokens.ids)[tokens.start :] == ENDING


def test_a_long_prompt_loses_its_end_before_the_model_runs(tokenizer):
    fits = "red" + " red" * ((MAX_TOKENS - len(ENDING) - 1) // 2)
    assert count_tokens(tokenizer, fits) == MAX_TOKENS == 1536
    assert tokenize(tokenizer, fits).cut == 0
    tokens = tokenize(tokenizer, fits + " ball")
    assert (tokens.used, tokens.cut, tokens.total) == (MAX_TOKENS, 2, MAX_TOKENS + 2)
    assert len(tokens.ids) == tokens.start + MAX_TOKENS
    assert tokenizer.convert_ids_to_tokens(tokens.ids[-3:]) == ["<|im_start|>", "assistant", "\n"]
    assert count_tokens(tokenizer, fits + " ball") == MAX_TOKENS + 2
    much_longer = tokenize(tokenizer, fits + " ball" * 40)
    assert tokenizer.convert_ids_to_tokens(much_longer.ids[-2:]) == ["ball", " "]


def test_the_special_tokens_of_the_tokenizer_stay_out_of_the_header():
    class AddsStart:
        chat_template = CHATML

        def __init__(self):
            self.inner = chat_tokenizer()

        def apply_chat_template(self, *args, **options):
            return self.inner.apply_chat_template(*args, **options)

        def encode(self, text, add_special_tokens=True):
            return [1] * add_special_tokens + self.inner.encode(text, add_special_tokens=False)

    assert tokenize(AddsStart(), "a red ball") == tokenize(chat_tokenizer(), "a red ball")


def test_a_template_without_the_header_is_refused():
    other = chat_tokenizer("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    with pytest.raises(CheckpointError, match="tokenizer folder that belongs to the checkpoint"):
        tokenize(other, "a red ball")


BROKEN_TEMPLATES = {
    "syntax": "{% for m in messages %}",
    "raises": "{{ raise_exception('only text') }}",
    "escapes": "{{ messages.__class__.__mro__ }}",
    "recurses": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.mark.parametrize("template", BROKEN_TEMPLATES.values(), ids=BROKEN_TEMPLATES)
def test_a_template_that_fails_is_refused_in_words(template):
    for use in (check_template, lambda broken: tokenize(broken, "a red ball")):
        with pytest.raises(CheckpointError, match="chat template fails on a prompt"):
            use(chat_tokenizer(template))


def test_a_template_that_leaves_the_prompt_out_is_refused():
    with pytest.raises(CheckpointError, match="leaves the prompt out"):
        check_template(chat_tokenizer(CHATML.replace("m.content", "'a red ball'")))
    # In this vocabulary both probes have the same tokens; their texts differ all the same.
    few_words = chat_tokenizer()
    assert tokenize(few_words, "a red stops").ids == tokenize(few_words, "a red runs").ids
    check_template(few_words)


def test_a_template_without_the_header_is_refused_when_it_is_checked():
    with pytest.raises(CheckpointError, match="do not occur"):
        check_template(chat_tokenizer("{% for m in messages %}{{ m.content }}\n{% endfor %}"))


def test_half_a_character_is_refused(tokenizer):
    with pytest.raises(RequestError, match="at position 2"):
        tokenize(tokenizer, "a \ud800")


@pytest.mark.parametrize("layers", [8, 6, 3, 2])
def test_embedding_is_the_third_last_hidden_state(tokenizer, layers):
    model = text_model(layers)
    if layers == 8:
        assert model.config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    tokens = tokenize(tokenizer, "a red ball rolls")
    with torch.no_grad():
        states = model(input_ids=torch.tensor([tokens.ids]), output_hidden_states=True, use_cache=False).hidden_states
    assert len(states) == layers + 1
    result = TextEncoder(tokenizer, model).encode("a red ball rolls")
    assert torch.equal(result.embedding, states[-3][:, tokens.start :])
    assert result.embedding.shape == (1, tokens.used, 16)
    assert (result.tokens, result.cut, result.warning) == (tokens.used, 0, None)


def test_trimming_twice_changes_nothing_and_too_few_layers_are_refused():
    model = trim(trim(text_model(8)))
    assert len(model.layers) == 6
    with pytest.raises(CheckpointError, match="1 layers"):
        trim(text_model(1))


def test_dead_weights_are_exactly_those_that_a_trimmed_model_lacks(tokenizer):
    model = text_model(8)
    whole = {key: value.clone() for key, value in model.state_dict().items()}
    expected = TextEncoder(tokenizer, model).encode("a red ball").embedding
    dead = dead_prefixes(model.config)
    assert dead == ("layers.6.", "layers.7.", "norm.")
    live = {key: value for key, value in whole.items() if not key.startswith(dead)}
    assert set(live) == set(model.state_dict())
    with torch.device("meta"):
        fresh = trim(Qwen3_5TextModel(model.config))
    fresh.load_state_dict(live, strict=True, assign=True)
    fresh.rotary_emb = model.rotary_emb
    assert torch.equal(TextEncoder(tokenizer, fresh).encode("a red ball").embedding, expected)


def test_a_cut_embedding_is_the_beginning_of_the_whole_one(tokenizer, monkeypatch):
    encoder = TextEncoder(tokenizer, text_model(8))
    whole = encoder.encode("a red ball rolls")
    monkeypatch.setattr(crop, "__defaults__", (5,))
    cut = encoder.encode("a red ball rolls")
    assert (cut.tokens, cut.cut) == (5, whole.tokens - 5)
    torch.testing.assert_close(cut.embedding, whole.embedding[:, :5], rtol=1e-4, atol=1e-4)
    assert f"{whole.tokens} tokens long" in cut.warning
    assert f"last {whole.tokens - 5} were cut off" in cut.warning


def test_bf16_models_give_bf16_embeddings_without_gradients(tokenizer):
    embedding = TextEncoder(tokenizer, text_model(4, torch.bfloat16)).encode("a red ball").embedding
    assert embedding.dtype == torch.bfloat16
    assert not embedding.requires_grad
    assert embedding.untyped_storage().nbytes() == embedding.numel() * 2


def test_unusable_embeddings_are_refused(tokenizer):
    model = text_model(3)
    model.embed_tokens.weight.data.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        TextEncoder(tokenizer, model).encode("a")
    for parameter in model.parameters():
        parameter.data.zero_()
    with pytest.raises(CheckpointError, match="only zeros"):
        TextEncoder(tokenizer, model).encode("a")
