exec python @torchrun@ @peer@ "$program" \
    @expanded@ "$@"
