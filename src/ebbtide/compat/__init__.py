"""Drop-ins: other projects' spellings, done by ebbtide."""
