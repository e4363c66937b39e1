"""A sync: ranks agree who takes what from whom (`coordination`), and fetch it (`bundles`)."""
