"""Operations of Penstock's own domain, for models."""
