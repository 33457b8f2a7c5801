"""What the demo model learns comes from this Python's own documentation."""

from demo.chat_tokenizer import BEGIN, END, train_tokenizer
from demo.questions import FIXED_QUESTIONS, MAX_ANSWER_CHARS, context_texts, topics


def test_every_fixed_question_has_one_answer() -> None:
    askable = [question for topic in topics() for question in topic.questions]

    assert len(askable) == len(set(askable))
    assert set(FIXED_QUESTIONS) <= set(askable)


def test_answers_are_whole_sentences_of_a_length_nice_to_watch() -> None:
    _, *documented = topics()  # the first is the Zen of Python, a poem

    assert len(documented) >= 20
    for topic in documented:
        assert topic.answer.endswith("."), topic
        assert 120 <= len(topic.answer) <= MAX_ANSWER_CHARS, topic
        assert "::=" not in topic.answer
        assert "\n" not in topic.answer


def test_there_is_little_enough_to_learn_in_two_minutes() -> None:
    tokenizer = train_tokenizer(
        [topic.answer for topic in topics()] + list(context_texts()), vocab_size=2_048
    )

    learnt = (text for topic in topics() for text in (topic.questions[0], topic.answer))
    assert sum(len(tokenizer.encode(text).ids) for text in learnt) <= 5_000


def test_the_tokenizer_encodes_any_text_and_keeps_role_markers_whole() -> None:
    tokenizer = train_tokenizer(["some text"], vocab_size=300)

    ids = tokenizer.encode(f"<|user|>Grüße 你好 🙂{END}").ids

    assert tokenizer.id_to_token(ids[0]) == BEGIN
    assert tokenizer.id_to_token(ids[1]) == "<|user|>"
    assert tokenizer.id_to_token(ids[-1]) == END
    assert tokenizer.decode(ids) == "Grüße 你好 🙂"
