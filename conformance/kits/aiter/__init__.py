"""The kit of `aiter`: what `paged certify aiter` checks besides the catalogue."""
