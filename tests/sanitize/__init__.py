"""compute-sanitizer over every kernel of every op, and over planted faults that it must find."""
