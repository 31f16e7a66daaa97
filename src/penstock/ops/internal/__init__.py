"""Operations that only passes and front ends create."""
