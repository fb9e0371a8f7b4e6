"""Equinox decoders: their attention runs on pages, through one call into a backend."""

from paged.models.adapter import PagedModel as PagedModel
from paged.models.adapter import page_attention as page_attention
from paged.models.config import DecoderConfig as DecoderConfig
from paged.models.config import llama3_rope_factors as llama3_rope_factors
from paged.models.decoder import Decoder as Decoder
from paged.models.decoder import abstract_decoder as abstract_decoder
from paged.models.decoder import decoder_specs as decoder_specs
from paged.models.decoder import random_decoder as random_decoder
from paged.models.decoder import shard_decoder as shard_decoder
from paged.models.multihead import MultiheadParts as MultiheadParts
