"""Operations: one contract each, `ref` in plain torch as the truth, faster implementations beside it."""
