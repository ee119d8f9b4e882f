"""Operations that read and write each number once: AdamW, cross entropy, sums."""
