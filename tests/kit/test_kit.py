import torch

from kit import TARGETS, markov_rand, markov_ring, target, tokenizer, zoo


def test_every_target_is_built_once_and_handed_out_as_a_fresh_copy():
    first, second = target("llama_gqa"), target("llama_gqa")
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert next(second.parameters()).abs().sum() > 0
    assert [name for name, _ in zoo()] == list(TARGETS[:7])


def test_building_targets_leaves_the_random_state_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    target("mistral_sw16")
    assert torch.equal(torch.rand(3), expected)


def test_the_ring_continues_every_word_with_the_next():
    words = tokenizer()
    logits = markov_ring()(torch.tensor([words.convert_tokens_to_ids(["w5", "w82"])])).logits
    assert words.convert_ids_to_tokens(logits[0].argmax(-1).tolist()) == ["w6", "w0"]


def test_the_random_law_is_the_rows_of_p():
    model, law = markov_rand()
    tokens = torch.tensor([[1, 20, 95, 40]])
    torch.testing.assert_close(model(tokens).logits.softmax(-1), law[tokens], atol=1e-6, rtol=0)
