"""All programs by name."""

from . import allocator, cache, driven, serving
from .program import Driven, Program

PROGRAMS: dict[str, Program | Driven] = {
    program.name: program
    for programs in (allocator.PROGRAMS, cache.PROGRAMS, serving.PROGRAMS, driven.PROGRAMS)
    for program in programs
}
