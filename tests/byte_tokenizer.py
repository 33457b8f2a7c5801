"""A vocabulary for grammars: all bytes, all pairs of letters and an end."""


def describe_tokenizer() -> str:
    """Return xgrammar's serialised form of it."""
    import xgrammar as xgr

    letters = range(97, 123)
    pairs = [bytes([a, b]) for a in letters for b in letters]
    info = xgr.TokenizerInfo(
        [*(bytes([byte]) for byte in range(256)), b"<end>", *pairs], stop_token_ids=[256]
    )
    return str(info.serialize_json())
