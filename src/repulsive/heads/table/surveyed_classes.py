"""Classes whose signature a survey has proved by building, running and tracing a model.

The list comes from `results/survey/transformers.json` (architectures with every group verified) and
`results/survey/packages.json`.
"""

from __future__ import annotations

# (package, signature) -> class names; "module.Class" where a package has several classes of the same name.
_NAMES: dict[tuple[str, str], str] = {
    ("diffusers", "q_proj/k_proj/v_proj"): "models.embeddings.HunyuanDiTAttentionPool",
    ("diffusers", "to_q/... + add_k_proj/..."): "models.transformers.transformer_wan.WanAttention",
    ("diffusers", "to_q/... + add_q_proj/..."): """
        models.attention_processor.MochiAttention models.transformers.transformer_flux.FluxAttention
        models.transformers.transformer_flux2.Flux2Attention
    """,
    ("diffusers", "to_q/to_k/to_v"): """
        models.transformers.transformer_flux.FluxAttention models.transformers.transformer_ltx.LTXAttention
        models.transformers.transformer_wan.WanAttention
    """,
    ("diffusers", "to_q/to_kv"): "models.embeddings.MochiAttentionPool",
    ("litgpt", "qkv"): "model.CausalSelfAttention",
    ("open_clip", "in_proj_weight"): "transformer.Attention",
    ("repulsive", "q_proj/k_proj/v_proj"): "Attention CausalAttention GraphAttention PygAttention",
    ("timm", "q/k/v"): "models.cait.ClassAttn models.nextvit.EfficientAttention",
    ("timm", "q/kv"): """
        layers.attention_pool.AttentionPoolLatent models.pvt_v2.Attention models.twins.GlobalSubSampleAttn
        models.volo.ClassAttention
    """,
    ("timm", "q_proj/k_proj/v_proj"): "layers.attention.AttentionRope models.eva.EvaAttention",
    ("timm", "qkv"): """
        layers.attention.Attention layers.attention.AttentionRope models.beit.Attention models.convit.MHSA
        models.davit.WindowAttention models.eva.EvaAttention models.fastvit.Attention models.gcvit.WindowAttentionGlobal
        models.hiera.MaskUnitAttention models.hieradet_sam2.MultiScaleAttention models.metaformer.Attention
        models.mvitv2.MultiScaleAttention models.nest.Attention models.swin_transformer.WindowAttention
        models.swin_transformer_v2.WindowAttention models.swin_transformer_v2_cr.WindowMultiHeadAttention
        models.twins.LocallyGroupedAttn models.vision_transformer_relpos.RelPosAttention
        models.vision_transformer_sam.Attention models.visformer.Attention models.volo.Attention
    """,
    ("timm", "wq/wk/wv"): "models.crossvit.CrossAttention",
    ("transformers", "Wq/Wk/Wv"): "models.ctrl.modeling_ctrl.MultiHeadAttention",
    ("transformers", "linear_q/linear_k/linear_v"): """
        FastSpeech2ConformerAttention Wav2Vec2BertSelfAttention Wav2Vec2ConformerSelfAttention
    """,
    ("transformers", "projection_query/..."): "CvtSelfAttention",
    ("transformers", "q/k/v"): """
        LongT5LocalAttention MPNetSelfAttention SwitchTransformersAttention UdopAttention
    """,
    ("transformers", "q_lin/k_lin/v_lin"): """
        models.flaubert.modeling_flaubert.MultiHeadAttention models.xlm.modeling_xlm.MultiHeadAttention
    """,
    ("transformers", "q_proj.linear/..."): "Gemma4AudioAttention MoshiAttention",
    ("transformers", "q_proj/k_proj/v_proj"): """
        ASTAttention AfmoeAttention AltCLIPAttention ApertusAttention ArceeAttention AriaTextAttention
        AudioFlamingo3Attention BambaAttention BeamAttention BeitAttention BigBirdPegasusDecoderAttention
        BioGptAttention BitNetAttention BlenderbotAttention BlenderbotSmallAttention CLIPAttention CLIPSegAttention
        CanaryCrossAttention CanarySelfAttention ChameleonAttention ChineseCLIPVisionAttention Cohere2Attention
        Cohere2MoeAttention CohereAsrCrossAttention CohereAsrSelfAttention CohereAttention Cosmos3EdgeTextAttention
        Cosmos3EdgeVisionAttention CwmAttention DFineSelfAttention DINOv3ViTAttention Data2VecAudioAttention
        DeformableDetrSelfAttention DeiTAttention Deimv2SelfAttention DetrCrossAttention DetrSelfAttention
        DiffLlamaAttention Dinov2Attention Dinov2WithRegistersAttention DogeAttention Dots1Attention Ernie4_5Attention
        Ernie4_5_MoeAttention EsmcAttention EuroBertAttention Exaone4Attention ExaoneMoeAttention FalconH1Attention
        FlexOlmoAttention FlintAttention GPTJAttention GPTNeoSelfAttention Gemma2Attention Gemma3Attention
        Gemma3nTextAttention Gemma4TextAttention Gemma4UnifiedTextAttention GemmaAttention GitVisionAttention
        Glm4Attention Glm4MoeAttention Glm4vTextAttention GlmAsrAttention GlmAttention GlmOcrTextAttention
        GptOssAttention GradiumPhononTTSAttention GraniteAttention GraniteMoeAttention GraniteMoeHybridAttention
        GraniteMoeSWAAttention GraniteMoeSharedAttention GraniteSWAAttention GroupViTAttention GteAttention
        HYV3Attention HeliumAttention HiggsAudioV2Attention HrmTextAttention HubertAttention HunYuanDenseV1Attention
        HunYuanMoEV1Attention HunYuanVLVisionAttention HyperCLOVAXAttention IJepaAttention Idefics2PerceiverAttention
        Idefics2VisionAttention Idefics3VisionAttention InformerAttention InformerProbSparseAttention InklingAttention
        InternVLVisionAttention Jais2Attention JambaAttention JanusVisionAttention JinaEmbeddingsV3Attention
        Kimi_K25VisionAttention Kolibri1Attention LEDDecoderAttention LagunaAttention LasrEncoderAttention Lfm2Attention
        Lfm2MoeAttention M2M100Attention MLCDAttention Mask2FormerAttention MaskFormerDetrCrossAttention
        MaskFormerDetrSelfAttention MellumAttention MetaClip2Attention MiMoV2FlashAttention MimiAttention
        MiniMaxAttention MiniMaxM2Attention MiniMaxM3VLAttention MiniMaxM3VLVisionAttention Ministral3Attention
        MinistralAttention ModernBertDecoderAttention Molmo2Attention MoonshineAttention
        MossTranscribeDiarizeAudioAttention MuseGlimmerTextAttention MuseSparkTextAttention MvpAttention
        NanoChatAttention Nemotron3DiarizationAttention Nemotron3_5TranscribeAttention
        NemotronAsrStreamingEncoderAttention NemotronAttention NemotronHAttention NeoMMEAttention NllbMoeAttention
        NomicBertAttention OPTAttention Olmo2Attention Olmo3Attention OlmoAttention OlmoHybridAttention OlmoeAttention
        OpenAIPrivacyFilterAttention Ovis2VisionAttention OwlViTAttention Owlv2Attention PLBartAttention
        PPDocLayoutV3SelfAttention PPDocLayoutV4SelfAttention PaddleOCRAttention PaddleOCRVisionAttention
        ParakeetEncoderAttention PatchTSTAttention PeAudioEncoderAttention PegasusXAttention
        PegasusXGlobalLocalAttention PhiAttention PhimoeAttention PixioAttention PixtralAttention PocketTTSAttention
        PocketTTSAudioTokenizerAttention QianfanOCRVisionAttention RTDetrSelfAttention RTDetrV2SelfAttention
        RadioAttention SEWAttention Sam3TrackerAttention Sam3ViTRoPEAttention SamAttention SamHQAttention
        Sapiens2Attention SeedOssAttention SegformerAttention Siglip2Attention SiglipAttention SmolLM3Attention
        SmolVLMVisionAttention SolarOpenAttention Speech2TextAttention SpeechT5Attention StableLmAttention
        Starcoder2Attention SwinAttention T5GemmaCrossAttention T5GemmaSelfAttention TableTransformerAttention
        TimeSeriesTransformerAttention TimesFmAttention Tipsv2TextAttention Tipsv2VisionAttention UltrabertAttention
        UniSpeechAttention UniSpeechSatAttention VaultGemmaAttention ViTMAEAttention ViTMSNAttention
        VideoLlama3VisionAttention VideoPrismAttention VitsAttention VivitAttention VoxtralAttention
        VoxtralRealtimeAttention Wav2Vec2Attention WavLMAttention WhisperAttention XGLMAttention Zamba2Attention
        ZambaAttention models.fsmt.modeling_fsmt.Attention
    """,
    ("transformers", "qkv"): """
        CohereCompassVisionAttention Exaone4_5_VisionAttention Glm4vMoeVisionAttention Glm4vVisionAttention
        Glm5NextVisionAttention GlmImageVisionAttention GlmOcrVisionAttention GotOcr2VisionAttention
        HieraMaskUnitAttention Qwen2_5_VLVisionAttention Qwen3OmniMoeVisionAttention Qwen3VLMoeVisionAttention
        Qwen3VLVisionAttention Qwen3_5MoeVisionAttention Qwen3_5VisionAttention Qwen4ExpVisionAttention
        SamHQVisionSdpaAttention SamVisionSdpaAttention TimesformerSelfAttention VitDetAttention
        models.qwen2_vl.modeling_qwen2_vl.VisionAttention
    """,
    ("transformers", "query/key/value"): """
        AlignTextSelfAttention AltRobertaSelfAttention BigBirdBlockSparseAttention BigBirdPegasusBlockSparseAttention
        BigBirdPegasusSelfAttention BigBirdSelfAttention Blip2QFormerMultiHeadAttention BridgeTowerCrossAttention
        BridgeTowerSelfAttention BrosSelfAttention CanineSelfAttention ChineseCLIPTextSelfAttention
        ConvBertSelfAttention DPTSelfAttention Data2VecTextSelfAttention Data2VecVisionSdpaSelfAttention
        DonutSwinSelfAttention ErnieSelfAttention EsmSelfAttention FlavaSelfAttention GLPNEfficientSelfAttention
        GitSelfAttention IBertSelfAttention LEDEncoderSelfAttention LayoutLMSelfAttention LayoutLMv3SelfAttention
        LongformerSelfAttention LukeSelfAttention MarkupLMSelfAttention MaskFormerSwinSelfAttention
        MegatronBertSelfAttention MobileBertSelfAttention MobileViTSelfAttention NystromformerSelfAttention
        PerceiverSelfAttention PvtEfficientSelfAttention PvtV2SelfAttention RemBertSelfAttention RoCBertSelfAttention
        RoFormerSelfAttention SplinterSelfAttention SqueezeBertSelfAttention Swin2SRSelfAttention Swinv2SelfAttention
        TapasSelfAttention VJEPA2RopeAttention VideoMAESelfAttention ViltSelfAttention VisualBertSelfAttention
        XmodSelfAttention YolosSelfAttention
    """,
    ("transformers", "query_proj/key_proj/value_proj"): """
        DisentangledSelfAttention ProphetNetAttention ProphetNetNgramSelfAttention
    """,
}
SURVEYED = {key: frozenset(names.split()) for key, names in _NAMES.items()}
